"""Downloading a model from the Hugging Face Hub, or a mirror of it, over plain HTTP.

HF_ENDPOINT names the mirror and HF_TOKEN opens gated models. A download that was cut off goes on where it stopped.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ModelMissing, ModelUnsupported
from penstock.core.files import naming, write_file
from penstock.hub.disk import cannot_store, check_room, chunks, is_of_disk, locked, publish, sha256
from penstock.hub.home import models_directory
from penstock.hub.progress import Progress

TRIES = 3  # in a row without a byte
TIMEOUT_S = 30.0
WANTED = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
}


@dataclass(frozen=True)
class RemoteFile:
    name: str
    url: str
    num_bytes: int
    sha256: str | None  # only large files have one


def download_hf(repository: str, *, progress: Progress, backoff_s: float = 1.0) -> Path:
    """The directory of `repository` ("org/name"), complete. Without a network, if it was completed before."""
    directory = hf_directory(repository)
    if is_complete(directory):
        return directory
    try:
        with locked(directory / ".lock", on_wait=lambda: progress(f"another process is pulling {repository}", 0, None)):
            if not is_complete(directory):
                files = _listing(repository, directory)
                check_room(directory, sum(_missing_bytes(file, directory / file.name) for file in files))
                for file in files:
                    _download(file, directory / file.name, progress, backoff_s)
    except urllib.error.HTTPError as error:
        raise ModelMissing(_refusal(repository, error.code)) from None
    except (OSError, http.client.HTTPException) as error:
        if is_of_disk(error):
            raise cannot_store(repository, error) from None
        raise ModelMissing(
            f"could not download {repository} from {_endpoint()}: {error}; check the network (or set HF_ENDPOINT to a "
            "mirror) and run the same again: what is there already is kept"
        ) from None
    return directory


def fetch_config(repository: str) -> dict[str, Any]:
    """config.json alone, for those who want to know what a model is like: some kilobytes, and nothing is kept."""
    try:
        with _open(f"{_endpoint()}/{repository}/resolve/main/config.json") as reply:
            config = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        raise ModelMissing(_refusal(repository, error.code)) from None
    except (OSError, http.client.HTTPException) as error:
        raise ModelMissing(f"could not read {repository} at {_endpoint()}: {error}; check the network") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ModelMissing(f"{_endpoint()} does not answer like the Hugging Face Hub; check HF_ENDPOINT")
    return config


def hf_directory(repository: str) -> Path:
    return models_directory() / "hf" / repository.replace("/", "--")


def is_complete(directory: Path) -> bool:
    """config.json comes last, so where it is, everything is."""
    return (directory / "config.json").is_file()


def _listing(repository: str, directory: Path) -> list[RemoteFile]:
    """What to download. The answer is kept, so that a later run goes on with the same revision and never mixes two."""
    kept = directory / ".listing.json"
    if not kept.is_file():
        partial = kept.with_name(".listing.json.part")
        with _open(f"{_endpoint()}/api/models/{repository}?blobs=true") as reply:
            write_file(partial, reply.read())
        publish(partial, kept)
    try:
        files = _parse_listing(repository, json.loads(kept.read_bytes()))
    except (ValueError, KeyError, TypeError):
        kept.unlink()
        raise ModelMissing(f"{_endpoint()} does not answer like the Hugging Face Hub; check HF_ENDPOINT") from None
    if not any(_is_weights(file.name) for file in files):
        kept.unlink()
        raise ModelUnsupported(f"{repository} has no safetensors weights; choose a repository that has")
    return sorted(files, key=lambda file: (file.name == "config.json", file.name))


def _parse_listing(repository: str, listing: dict[str, Any]) -> list[RemoteFile]:
    base = f"{_endpoint()}/{repository}/resolve/{listing['sha']}"
    return [
        RemoteFile(name, f"{base}/{name}", entry["size"], (entry.get("lfs") or {}).get("sha256"))
        for entry in listing["siblings"]
        if (name := entry["rfilename"]) in WANTED or (name.startswith("model") and _is_weights(name))
    ]


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _download(file: RemoteFile, path: Path, progress: Progress, backoff_s: float) -> None:
    if path.is_file():
        return
    partial = path.with_name(path.name + ".part")
    fruitless = 0
    while (before := _size(partial)) < file.num_bytes:
        failure: Exception = OSError(f"{file.name} was cut off")
        try:
            _append(file, partial, progress)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise
            failure = error
        except (OSError, http.client.HTTPException) as error:
            if is_of_disk(error):
                raise
            failure = error
        fruitless = 0 if _size(partial) > before else fruitless + 1
        if fruitless == TRIES:
            raise failure
        time.sleep(backoff_s * fruitless)
    partial.touch()  # for empty files
    if _size(partial) != file.num_bytes or (file.sha256 and sha256(partial) != file.sha256):
        partial.unlink()
        raise OSError(f"{file.name} arrived damaged")
    publish(partial, path)


def _missing_bytes(file: RemoteFile, path: Path) -> int:
    return 0 if path.is_file() else max(0, file.num_bytes - _size(path.with_name(path.name + ".part")))


def _append(file: RemoteFile, partial: Path, progress: Progress) -> None:
    done_bytes = _size(partial)
    with _open(file.url, start=done_bytes) as reply:
        resumes = reply.status == http.client.PARTIAL_CONTENT
        with partial.open("ab" if resumes else "wb") as target:
            done_bytes = done_bytes if resumes else 0
            for chunk in chunks(reply):
                with naming(partial):
                    target.write(chunk)
                    target.flush()
                done_bytes += len(chunk)
                progress(f"downloading {file.name}", done_bytes, file.num_bytes)


def _open(url: str, start: int = 0) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "penstock"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token := os.environ.get("HF_TOKEN"):
        # Not for the storage host that large files are redirected to.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _refusal(repository: str, status: int) -> str:
    if status in (401, 403):
        return f"{_endpoint()} does not let us read {repository}: if it exists, accept its terms there and set HF_TOKEN"
    if status == 404:
        return f"{_endpoint()} has no model {repository}; check its name"
    return f"{_endpoint()} answered {status} for {repository}; try again later"
