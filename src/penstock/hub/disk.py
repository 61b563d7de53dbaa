"""Files that several processes may want at once, and that a killed process must not leave half written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from penstock.core.errors import ModelMissing
from penstock.core.files import in_words, naming
from penstock.core.private_files import make_private, open_private
from penstock.hub.progress import Progress

CHUNK_BYTES = 1 << 20
WATCH_EVERY_S = 0.2


@contextmanager
def locked(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold `path` against other processes. The kernel lets go when the holder dies, however it dies."""
    make_private(path.parent)
    with open_private(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name once all of it is written; of one that is not, nothing is left."""
    partial = path.with_name(path.name + ".part")
    try:
        with naming(path):
            with partial.open("wb") as file:
                yield file
            publish(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def bytes_in(directory: Path) -> int:
    """Bytes of the files in there, of those that do not go meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


@contextmanager
def watched(directory: Path, what: str, total: int, progress: Progress) -> Iterator[None]:
    """Report how the directory grows while others write into it."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_EVERY_S):
            progress(what, min(bytes_in(directory), total - 1), total)  # not done before the writer says so

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(what, total, total)


def check_room(directory: Path, num_bytes: int) -> None:
    """Raise the OSError of a full disk, before anything is written. The directory must exist."""
    if (free := shutil.disk_usage(directory).free) < num_bytes:
        said = f"{num_bytes / 1e6:,.1f} MB are needed and {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, said, str(directory))


def cannot_store(name: str, error: OSError, verb: str = "store") -> ModelMissing:
    return ModelMissing(f"cannot {verb} {name}: {in_words(error, instead='set PENSTOCK_HOME elsewhere')}")


def publish(partial: Path, path: Path) -> None:
    """Give a finished file its name, so that it survives a power cut whole or not at all."""
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """A file's content, or a directory's names, onto the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_all(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync(path)
    sync(directory)
