"""Models of the Hugging Face Hub, or of a mirror of it, fetched by `huggingface_hub`.

HF_ENDPOINT names the mirror and HF_TOKEN opens gated models; HF_HUB_OFFLINE=1 keeps from asking. Files that other
programs have put into the Hub's own cache are copied from there. The library resumes a connection that breaks off, and
keeps the files that are whole when a process dies; it checks their sizes only, so the weights cache checks the hashes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.hub.cache.record import RECORD, FileRecord, Record, read_record
from penstock.hub.cache.weights import Reserve
from penstock.hub.disk import watched
from penstock.hub.progress import Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

LIBRARY = "penstock"
HF_PREFIX = "hf:"
WANTED = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "sentence_bert_config.json",  # how an encoder's vectors are made of its tokens'
    "1_Pooling/config.json",
    "preprocessor_config.json",  # how a model sees images
    "processor_config.json",
}


@dataclass(frozen=True)
class HubSource:
    repository: str  # org/name

    @property
    def spec(self) -> str:
        return f"{HF_PREFIX}{self.repository}"

    @property
    def place(self) -> str:
        return f"hf/{self.repository.replace('/', '--')}"

    def unrecorded(self, directory: Path) -> Record | None:
        """Record of files that an older version left: it kept the Hub's listing, and wrote config.json last."""
        if not (directory / "config.json").is_file():
            return None
        try:
            listing = json.loads((directory / ".listing.json").read_bytes())
            files = {
                entry["rfilename"]: _file(entry["size"], (entry.get("lfs") or {}).get("sha256"))
                for entry in listing["siblings"]
            }
            files = {name: file for name, file in files.items() if is_wanted(name)}
            revision = listing["sha"]
        except (OSError, ValueError, KeyError, TypeError):
            files, revision = (
                {path.name: _file(path.stat().st_size) for path in directory.iterdir() if is_wanted(path.name)},
                None,
            )
        record = Record(spec=self.spec, files=files, revision=revision)
        return record if record.is_whole(directory) else None

    def fetch(self, directory: Path, reserve: Reserve, progress: Progress) -> Record:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RevisionNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars

        with self._errors_in_words():
            # A fetch that was cut off goes on with its revision: files of two are never mixed.
            kept = read_record(directory)
            record = kept if kept is not None and kept.revision is not None else self._listing()
            reserve(record, 0)
            for unfinished in directory.rglob("*.incomplete"):
                unfinished.unlink()  # of a process that was killed: the library never reads it again
            try:
                with (
                    watched(directory, f"downloading {self.repository}", record.num_bytes, progress),
                    disable_progress_bars(),
                ):
                    for name in record.files:  # one by one: an interrupt need not wait for the library's threads
                        hf_hub_download(
                            self.repository,
                            name,
                            revision=record.revision,
                            local_dir=directory,
                            endpoint=_endpoint(),
                            library_name=LIBRARY,
                        )
            except RevisionNotFoundError:
                (directory / RECORD).unlink()
                raise
        return record

    def read_config(self) -> dict[str, Any]:
        """config.json alone, for those who want to know what a model is like: some kilobytes, and nothing is kept."""
        from huggingface_hub import hf_hub_download

        with self._errors_in_words(), tempfile.TemporaryDirectory() as directory:
            path = hf_hub_download(
                self.repository, "config.json", local_dir=directory, endpoint=_endpoint(), library_name=LIBRARY
            )
            try:
                config = json.loads(Path(path).read_bytes())
            except ValueError:
                config = None
        if not isinstance(config, dict):
            raise _no_hub()
        return config

    def _listing(self) -> Record:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=_endpoint(), library_name=LIBRARY)
        try:
            found = api.model_info(self.repository, files_metadata=True)
            files = {file.rfilename: _listed(file) for file in found.siblings or () if is_wanted(file.rfilename)}
        except (ValueError, KeyError, TypeError):
            raise _no_hub() from None
        if not any(map(is_weights, files)):
            raise ModelUnsupported(f"{self.repository} has no safetensors weights; choose a repository that has")
        return Record(spec=self.spec, files=files, revision=found.sha)

    @contextmanager
    def _errors_in_words(self) -> Iterator[None]:
        """Errors of the library as ours; those of the disk pass."""
        import httpx2
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )

        try:
            yield
        except HFValidationError:
            raise ModelMissing(f"{self.spec!r} is not a name of the Hugging Face Hub") from None
        except (OSError, httpx2.HTTPError, RuntimeError) as error:  # the last are Xet's
            failure: BaseException = error
            if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
                failure = error.__cause__
            if isinstance(failure, HfHubHTTPError):
                raise ModelMissing(_refusal(self.repository, failure.response.status_code)) from None
            if isinstance(failure, OfflineModeIsEnabled):
                raise ModelMissing(
                    f"{self.repository} is not in the cache, and HF_HUB_OFFLINE keeps from fetching it; unset that, or "
                    "pull it where there is a network"
                ) from None
            if isinstance(failure, OSError) and failure.errno is not None:
                raise
            raise ModelMissing(
                f"could not download {self.repository} from {_endpoint()}: {failure or type(failure).__name__}; check "
                "the network (or set HF_ENDPOINT to a mirror) and run the same again: files that are whole are kept"
            ) from None


def _listed(file: RepoSibling) -> FileRecord:
    if file.size is None:
        raise ValueError(f"{file.rfilename} has no size")
    if file.lfs is not None:
        return _file(file.size, file.lfs.sha256)
    return FileRecord(file.size, None if file.blob_id is None else f"git-sha1:{file.blob_id}")


def _file(num_bytes: int, sha256: str | None = None) -> FileRecord:
    return FileRecord(num_bytes, None if sha256 is None else f"sha256:{sha256}")


def is_wanted(name: str) -> bool:
    return name in WANTED or (name.startswith("model") and is_weights(name))


def is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _no_hub() -> ModelMissing:
    return ModelMissing(f"{_endpoint()} does not answer like the Hugging Face Hub; check HF_ENDPOINT")


def _refusal(repository: str, status: int) -> str:
    if status in (401, 403):
        return f"{_endpoint()} does not let us read {repository}: if it exists, accept its terms there and set HF_TOKEN"
    if status == 404:
        return f"{_endpoint()} has no model {repository}; check its name"
    return f"{_endpoint()} answered {status} for {repository}; try again later"
