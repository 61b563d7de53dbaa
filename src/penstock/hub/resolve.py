"""From what a user types to a checkpoint: an alias, a .gguf file, a Hugging Face directory, or hf:org/name."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.core.config import nearest
from penstock.core.errors import ModelMissing
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.encoder import EncoderCheckpoint, is_encoder
from penstock.hub.gguf import GGUFCheckpoint
from penstock.hub.hf import HFCheckpoint
from penstock.hub.hf_directory import HFDirectory
from penstock.hub.hf_download import download_hf
from penstock.hub.progress import Progress, silent
from penstock.hub.pull import ALIASES, pull

HF_PREFIX = "hf:"
# org/name. No leading dots: none may lead out of the models directory, or to another path of the server.
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
ModelFiles = Checkpoint | HFDirectory  # both have the config and the tokenizer
FORMS = f"a name ({', '.join(ALIASES)}), a .gguf file, a Hugging Face directory, or hf:org/name"


def resolve(spec: str, *, progress: Progress | None = None) -> Checkpoint:
    """Open what `spec` names, downloading it first where it has to be. An alias wins over a file of the same name."""
    progress = progress or silent
    if spec in ALIASES:
        weights = pull(spec, progress=progress)
        return _open(weights if weights.suffix == ".gguf" else weights.parent)
    if spec.startswith(HF_PREFIX):
        return _open(download_hf(repository_of(spec), progress=progress))
    path = Path(spec).expanduser()
    if path.exists():
        return _open(path)
    raise ModelMissing(f"there is no model {spec!r}{_suggestion(spec)} Give {FORMS}")


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        return GGUFCheckpoint(path)
    return EncoderCheckpoint(path) if is_encoder(path) else HFCheckpoint(path)


def describe(spec: str, *, progress: Progress | None = None) -> ModelFiles:
    """What `spec` names, for those who want no weights: a directory need not have any."""
    path = Path(spec).expanduser()
    return HFDirectory(path) if spec not in ALIASES and path.is_dir() else resolve(spec, progress=progress)


def default_name(spec: str) -> str:
    """The model id to serve under: smollm2, a file's stem, a directory's name, org/name."""
    if spec in ALIASES:
        return spec
    if spec.startswith(HF_PREFIX):
        return spec.removeprefix(HF_PREFIX)
    path = Path(spec).expanduser().resolve()
    return path.stem if path.suffix == ".gguf" else path.name


def repository_of(spec: str) -> str:
    repository = spec.removeprefix(HF_PREFIX)
    if not REPOSITORY.fullmatch(repository):
        raise ModelMissing(f"{spec!r} is not of the form hf:org/name")
    return repository


def _suggestion(spec: str) -> str:
    if alias := nearest(spec.lower(), ALIASES):
        return f"; did you mean {alias!r}?"
    return f"; did you mean 'hf:{spec}'?" if REPOSITORY.fullmatch(spec) else "."
