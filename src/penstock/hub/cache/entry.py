"""A model's places in the cache, and the locks that processes meet at.

    models/smollm2, models/hf/org--name    a model, whole and verified: a directory appears and goes by one rename
    models/.partial/…                      the same while it is fetched; a killed fetch goes on from there
    models/.locks/….lock                   held by whoever fetches, verifies, pins or removes the model
    models/.locks/….use                    held, shared, by each process that uses it; its time is that of the last use
    models/.trash                          what is being deleted

The kernel lets go of a lock when its holder dies, however it dies.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.core.private_files import FILE_MODE, make_private
from penstock.hub.disk import sync, sync_all


@dataclass(frozen=True)
class Entry:
    models: Path
    place: str  # under `models`

    @property
    def directory(self) -> Path:
        return self.models / self.place

    @property
    def partial(self) -> Path:
        return self.models / ".partial" / self.place

    @property
    def lock(self) -> Path:
        return self.models / ".locks" / f"{self.place.replace('/', '--')}.lock"

    @property
    def use(self) -> Path:
        return self.lock.with_suffix(".use")

    def hold(self) -> None:
        """Nobody removes the model before this process ends: what it loaded it may have mapped, and may load again."""
        _hold(self.use)

    def is_in_use(self) -> bool:
        return _is_held(self.use)

    def is_being_changed(self) -> bool:
        return _is_held(self.lock)

    def last_used_at(self) -> float | None:
        """None: no process has used it yet."""
        try:
            return self.use.stat().st_mtime
        except OSError:
            return None

    def publish(self) -> None:
        """Moves what was fetched to its place, whole or not at all, also after a power cut."""
        sync_all(self.partial)
        make_private(self.directory.parent)
        self._drop(self.directory)
        self.partial.rename(self.directory)
        sync(self.directory.parent)

    def take_back(self) -> None:
        """An incomplete model becomes one that is being fetched: what is right of it is not fetched again."""
        if self.directory.exists():
            self._drop(self.partial)
            make_private(self.partial.parent)
            self.directory.rename(self.partial)

    def remove(self) -> None:
        """Deletes the entry, claimed by the caller. The file `use` stays, since processes may be waiting at it."""
        self._drop(self.directory)
        self._drop(self.partial)

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Whether nobody else changes or uses the model, and nobody will in here."""
        make_private(self.lock.parent)
        with contextlib.ExitStack() as stack:
            yield all(stack.enter_context(_tried(path)) for path in (self.lock, self.use))

    def _drop(self, directory: Path) -> None:
        if directory.exists():
            trash = self.models / ".trash"
            make_private(trash)
            directory.rename(gone := trash / uuid.uuid4().hex)
            shutil.rmtree(gone, ignore_errors=True)


def empty_trash(models: Path) -> None:
    """Deletes what killed processes did not get to delete."""
    trash = models / ".trash"
    for gone in trash.iterdir() if trash.is_dir() else ():
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _tried(path: Path) -> Iterator[bool]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(file)


@cache
def _hold(use: Path) -> int | None:
    """One descriptor for each model and process, open until it ends. None: a cache that cannot be written has nobody
    who removes models."""
    try:
        make_private(use.parent)
        file = os.open(use, os.O_RDWR | os.O_CREAT, FILE_MODE)
    except OSError:
        return None
    fcntl.flock(file, fcntl.LOCK_SH)
    _touch(use)
    atexit.register(_touch, use)
    return file


def _touch(use: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(use)


def _is_held(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
