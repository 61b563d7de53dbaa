"""Resolution of what a user types to a checkpoint: an alias, a .gguf file, a Hugging Face directory, or hf:org/name."""

from __future__ import annotations

from pathlib import Path

from penstock.core.config import nearest
from penstock.core.errors import ModelMissing
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.encoder import EncoderCheckpoint, is_encoder
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_directory import HFDirectory
from penstock.hub.hf_download import HF_PREFIX
from penstock.hub.progress import Progress, silent
from penstock.hub.pull import ALIASES
from penstock.hub.remote.source import default_name as remote_name
from penstock.hub.sources import REPOSITORY, local_path, source_of, url_source, weights_cache

ModelFiles = Checkpoint | HFDirectory  # both have the config and the tokenizer
FORMS = (
    f"a name ({', '.join(ALIASES)}), a .gguf file, a Hugging Face directory, or hf:org/name, or the URL of a file or "
    "a directory (https:, s3:)"
)


def resolve(spec: str, *, progress: Progress | None = None) -> Checkpoint:
    """Open what `spec` names, downloading it first where it has to be. An alias wins over a file of the same name."""
    if (source := source_of(spec)) is not None:
        cache = weights_cache()
        cache.hold(source)
        return _open(cache.ensure(source, progress or silent))
    path = local_path(spec)
    if path.exists():
        return _open(path)
    raise ModelMissing(f"there is no model {spec!r}{_suggestion(spec)} Give {FORMS}")


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        return GGUFCheckpoint(path)
    return EncoderCheckpoint(path) if is_encoder(path) else HFCheckpoint(path)


def describe(spec: str, *, progress: Progress | None = None) -> ModelFiles:
    """Files that `spec` names, for those who want no weights: a directory need not have any."""
    path = local_path(spec)
    return HFDirectory(path) if spec not in ALIASES and path.is_dir() else resolve(spec, progress=progress)


def default_name(spec: str) -> str:
    """The model id to serve under: smollm2, a file's stem, a directory's name, org/name."""
    if spec in ALIASES:
        return spec
    if spec.startswith(HF_PREFIX):
        return spec.removeprefix(HF_PREFIX)
    if url_source(spec) is not None:
        return remote_name(spec)
    path = local_path(spec).resolve()
    return path.stem if path.suffix in (".gguf", ".onnx") else path.name


def _suggestion(spec: str) -> str:
    if alias := nearest(spec.lower(), ALIASES):
        return f"; did you mean {alias!r}?"
    return f"; did you mean 'hf:{spec}'?" if REPOSITORY.fullmatch(spec) else "."
