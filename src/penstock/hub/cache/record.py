"""Record of a cached model: its source, what its files must be, and what fetching it took.

It lies in the model's directory, so it comes and goes with the files. It knows no lock and no network.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
from msgspec.structs import replace

from penstock.core.files import write_json
from penstock.hub.disk import chunks, publish
from penstock.hub.progress import Progress, silent

RECORD = ".penstock.json"


class FileRecord(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: str | None = None  # "sha256:…", or "git-sha1:…" where git keeps the file; None: the source names none


class Record(msgspec.Struct, frozen=True, kw_only=True):
    spec: str
    files: dict[str, FileRecord]  # by their place in the directory
    model: str = "."  # what is opened: the directory, or a file in it
    revision: str | None = None
    pinned: bool = False
    fetched_at: float | None = None
    fetch_s: float | None = None  # from the first request until the files were verified
    fetched_bytes: int | None = None  # the part of the files that was fetched in that time
    verified_at: float | None = None  # None: not all of it is there

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    def is_whole(self, directory: Path) -> bool:
        """Files get into a published directory only once their hashes were right, and hashing at every start would
        cost time: so by size."""
        return all(_size(directory / name) == file.num_bytes for name, file in self.files.items())

    def missing_bytes(self, directory: Path) -> int:
        sizes = ((_size(directory / name), file.num_bytes) for name, file in self.files.items())
        return sum(num_bytes for size, num_bytes in sizes if size != num_bytes)

    def damaged(self, directory: Path, progress: Progress = silent) -> list[str]:
        """Files that are missing or not what the source has, by reading all of them."""
        return [name for name, file in self.files.items() if not _is_right(directory / name, file, progress)]

    def with_digests(self, directory: Path, progress: Progress = silent) -> Record:
        """The same with hashes of what arrived where the source names none, so that damage is found later."""
        files = {
            name: replace(file, digest=digest_of(directory / name, "sha256", progress)) if file.digest is None else file
            for name, file in self.files.items()
        }
        return replace(self, files=files)

    def write(self, directory: Path) -> None:
        partial = directory / f"{RECORD}.part"
        write_json(partial, self)
        publish(partial, directory / RECORD)


_record_decoder = msgspec.json.Decoder(Record)


def read_record(directory: Path) -> Record | None:
    try:
        return _record_decoder.decode((directory / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def digest_of(path: Path, algorithm: str, progress: Progress = silent) -> str:
    """The SHA-256 of a file, or the SHA-1 that git names it by."""
    total = path.stat().st_size
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(f"blob {total}\0".encode())
    done = 0
    with path.open("rb") as file:
        for chunk in chunks(file):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {path.name}", done, total)
    return f"{algorithm}:{digest.hexdigest()}"


def _is_right(path: Path, file: FileRecord, progress: Progress) -> bool:
    if _size(path) != file.num_bytes:
        return False
    return file.digest is None or digest_of(path, file.digest.partition(":")[0], progress) == file.digest


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
