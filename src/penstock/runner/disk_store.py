"""KV blocks on disk: a directory of files, and the threads that read and write them while the engine computes.

    PATH/LAYOUT-0/HASH-PARENT[-ROUTING].kv

LAYOUT is a digest of all that a block's bytes depend on: the model's files, number formats, kernels, penstock's code.
Each engine on a layout at the same time has a directory of its own: the first that no other has locked. The kernel lets
go of the lock when its holder dies.

One thread makes the directory ready, writes and removes; a few read. Nothing here stops the engine: errors are counted,
and logged once per kind. Sizes hold at any moment, since a file is removed before its successor is written; a file that
a killed process has left half written is removed at the next start. Directories that no engine uses count too: their
files go when they are too old, and first when room is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from penstock.core.errors import ConfigError
from penstock.core.files import in_words, naming
from penstock.core.hashing import BlockHash
from penstock.core.private_files import FILE_MODE, make_private
from penstock.kv.disk import DiskNews, Expired, Fetched, Found, Written
from penstock.runner.block_file import (
    HEADER_BYTES,
    PARTIAL,
    SUFFIX,
    BlockName,
    DamagedFile,
    Parts,
    read_block,
    write_block,
)

log = logging.getLogger("penstock.runner")

_DIRECTORY = re.compile(r"[0-9a-f]{32}-\d+")
_LOCK = ".lock"
_MAX_ENGINES = 256  # of one layout in one place
_READERS = 2
_MAX_NEWS = 2048  # taken at once, between two steps
_PAUSE_S = 10.0  # without writing, after a write that failed
_LOOK_S = 60.0  # how often files that are too old are looked for, at least
_CLOCK_SLACK_S = 300.0  # files may be from so far in the future; more is a clock that nobody can trust
_GIB = 1 << 30


class HostMemory(Protocol):
    """Blocks in host memory: see `HostCopies`."""

    def parts(self, block: int) -> list[memoryview]: ...

    def wait_saved(self) -> None: ...


@dataclass(frozen=True)
class DiskLimits:
    max_bytes: int
    max_age_s: float


@dataclass(frozen=True, slots=True)
class _Entry:
    name: BlockName
    written_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    name: BlockName
    block: int


class DiskStore:
    """Implements `BlockFiles`."""

    def __init__(
        self,
        path: Path,
        layout: bytes,
        memory: HostMemory,
        limits: DiskLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`layout`: a digest of 16 bytes."""
        self.block_bytes = HEADER_BYTES + sum(map(len, memory.parts(0)))
        self.num_blocks = limits.max_bytes // self.block_bytes
        if not self.num_blocks:
            wanted, block = limits.max_bytes / _GIB, self.block_bytes / _GIB
            message = f"disk_kv_gib is {wanted:g}, which has no room for one block of {block:.3g} GiB"
            raise ConfigError(message, param="disk_kv_gib")
        self.num_damaged = 0
        self.num_errors = 0
        self.directory: Path | None = None  # once it is ours
        self._path = path
        self._layout = layout
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self._entries: dict[BlockHash, _Entry] = {}  # the one written first comes first
        self._others: deque[tuple[float, int, Path]] = deque()  # files that no engine uses: time, bytes; oldest first
        self._other_bytes = 0
        self._paused_until_s = 0.0
        self._said: set[str] = set()
        self._jobs: SimpleQueue[_Write | BlockHash | None] = SimpleQueue()  # to write, to remove, to end
        self._reads: SimpleQueue[tuple[BlockHash, int] | None] = SimpleQueue()
        self._news: deque[DiskNews] = deque()
        self._has_news = threading.Event()
        self._is_ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, name="kv-disk-write", daemon=True),
            *(threading.Thread(target=self._read, name=f"kv-disk-read-{i}", daemon=True) for i in range(_READERS)),
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's side

    def write(self, own: BlockHash, parent: BlockHash, routing_hash: int | None, block: int) -> None:
        self._jobs.put(_Write(BlockName(own, parent, routing_hash), block))

    def fetch(self, own: BlockHash, block: int) -> None:
        self._reads.put((own, block))

    def remove(self, own: BlockHash) -> None:
        self._jobs.put(own)

    def news(self) -> list[DiskNews]:
        self._has_news.clear()
        count = min(len(self._news), _MAX_NEWS)
        found = [self._news.popleft() for _ in range(count)]
        if self._news:
            self._has_news.set()
        return found

    def wait(self, timeout_s: float) -> None:
        self._has_news.wait(timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until it is known which files are there, or for `timeout_s`."""
        self._is_ready.wait(timeout_s)

    def close(self) -> None:
        """End all threads, once what was asked for is done. Files stay."""
        self._jobs.put(None)
        for _ in range(_READERS):
            self._reads.put(None)
        for thread in self._threads:
            thread.join()

    # -- the thread that writes

    def _keep(self) -> None:
        with contextlib.ExitStack() as held:
            try:
                self.directory = held.enter_context(_own_directory(self._path, self._layout.hex()))
                self._take_stock(self.directory)
            except OSError as error:
                self.directory = None
                self._complain("no KV blocks are kept on disk", error)
            self._is_ready.set()
            while True:
                try:
                    job = self._jobs.get(timeout=self._next_look_s())
                except Empty:
                    job = b""
                if job is None:
                    return
                try:
                    if isinstance(job, _Write):
                        self._tell(Written(job.name.own, self._write(job)))
                    elif job:
                        self._remove(job)
                    self._expire()
                except Exception as error:  # nothing depends on this
                    self._complain("KV blocks on disk", error)

    def _next_look_s(self) -> float:
        first = next(iter(self._entries.values()), None)
        if first is None:
            return _LOOK_S
        return min(_LOOK_S, max(0.1, first.written_s + self._limits.max_age_s - self._clock()))

    def _write(self, job: _Write) -> bool:
        now = self._clock()
        if self.directory is None or now < self._paused_until_s or not self._has_room():
            return False
        try:
            self._memory.wait_saved()
            with naming(self.directory):
                write_block(self.directory, job.name, self._layout, self._memory.parts(job.block))
        except Exception as error:
            self._complain("a KV block is not kept on disk", error)
            self._paused_until_s = now + _PAUSE_S
            return False
        known = self._entries.pop(job.name.own, None)
        if known is not None and known.name != job.name:
            _unlink(self.directory / known.name.file_name)
        self._entries[job.name.own] = _Entry(job.name, now)
        return True

    def _has_room(self) -> bool:
        """Whether there is room for one more file; those that no engine uses give way."""
        while self._others and self._total_bytes() + self.block_bytes > self._limits.max_bytes:
            _, num_bytes, path = self._others.popleft()
            self._other_bytes -= num_bytes
            with _locked(path.parent) as is_ours:
                if is_ours:  # else an engine uses it again, and counts it
                    _unlink(path)
                    _remove_if_empty(path.parent)
        return self._total_bytes() + self.block_bytes <= self._limits.max_bytes

    def _total_bytes(self) -> int:
        return len(self._entries) * self.block_bytes + self._other_bytes

    def _remove(self, own: BlockHash) -> None:
        entry = self._entries.get(own)
        if entry is not None and self.directory is not None:
            with naming(path := self.directory / entry.name.file_name):
                path.unlink(missing_ok=True)
            self._entries.pop(own, None)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._limits.max_age_s
        while (first := next(iter(self._entries.values()), None)) is not None and first.written_s < oldest_s:
            self._remove(first.name.own)
            self._tell(Expired(first.name.own))
        while self._others and self._others[0][0] < oldest_s:
            _, num_bytes, path = self._others.popleft()
            self._other_bytes -= num_bytes
            with _locked(path.parent) as is_ours:
                if is_ours:
                    _unlink(path)
                    _remove_if_empty(path.parent)

    # -- what is there at the start

    def _take_stock(self, directory: Path) -> None:
        now = self._clock()
        oldest_s, newest_s = now - self._limits.max_age_s, now + _CLOCK_SLACK_S
        found: list[_Entry] = []
        for path, status in _files(directory):
            name = BlockName.parse(path.name)
            is_right = name is not None and stat.S_ISREG(status.st_mode) and status.st_size == self.block_bytes
            if name is not None and is_right and oldest_s <= status.st_mtime <= newest_s:
                found.append(_Entry(name, min(status.st_mtime, now)))
            else:
                path.unlink(missing_ok=True)
        found.sort(key=lambda entry: entry.written_s)
        newest = {entry.name.own: entry for entry in found}
        kept = [entry for entry in found if newest[entry.name.own] is entry][-self.num_blocks :]
        self._entries = {entry.name.own: entry for entry in kept}
        for entry in found:
            if self._entries.get(entry.name.own) is not entry:
                (directory / entry.name.file_name).unlink(missing_ok=True)
        self._look_at_others(directory, oldest_s)
        self._has_room()  # makes some, where others have too much
        for entry in kept:
            self._tell(Found(entry.name.own, entry.name.parent, entry.name.routing_hash))

    def _look_at_others(self, directory: Path, oldest_s: float) -> None:
        others = []
        for other in self._path.iterdir():
            if other == directory or not _DIRECTORY.fullmatch(other.name) or other.is_symlink():
                continue
            with _locked(other) as is_ours:
                if not is_ours:
                    continue
                for path, status in _files(other):
                    if status.st_mtime < oldest_s or path.name.endswith(PARTIAL):
                        _unlink(path)
                    else:
                        others.append((status.st_mtime, status.st_size, path))
                _remove_if_empty(other)
        self._others = deque(sorted(others))
        self._other_bytes = sum(num_bytes for _, num_bytes, _ in others)

    # -- the threads that read

    def _read(self) -> None:
        while (job := self._reads.get()) is not None:
            own, block = job
            began_s = time.perf_counter()
            is_whole = self._is_read(own, self._memory.parts(block))
            self._tell(Fetched(own, is_whole, time.perf_counter() - began_s))

    def _is_read(self, own: BlockHash, parts: Parts) -> bool:
        """A file that is not whole, or cannot be read, is removed."""
        entry, directory = self._entries.get(own), self.directory
        if entry is None or directory is None:
            return False
        try:
            self._memory.wait_saved()  # what was to go there before may still be on its way
            with naming(directory / entry.name.file_name):
                read_block(directory, entry.name, self._layout, parts)
            return True
        except FileNotFoundError:  # somebody made room
            pass
        except DamagedFile as error:
            self.num_damaged += 1
            log.warning("a KV block on disk is damaged and not used: %s", error)
        except Exception as error:
            self._complain("a KV block on disk cannot be read", error)
        self._jobs.put(own)
        return False

    # -- what both say

    def _tell(self, news: DiskNews) -> None:
        self._news.append(news)
        self._has_news.set()

    def _complain(self, what: str, error: Exception) -> None:
        """Every kind of error is said once."""
        self.num_errors += 1
        words = in_words(error, instead="set disk_kv_path elsewhere") if isinstance(error, OSError) else repr(error)
        kind = f"{what} {type(error).__name__} {getattr(error, 'errno', None)}"
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s: %s (said once; see penstock_disk_kv_errors_total)", what, words)


@contextlib.contextmanager
def _own_directory(path: Path, layout: str) -> Iterator[Path]:
    """The first directory of this layout that no other engine has, locked for as long as it is used."""
    make_private(path)
    for number in range(_MAX_ENGINES):
        directory = path / f"{layout}-{number}"
        make_private(directory)
        with _locked(directory) as is_ours:
            if is_ours:
                _check_private(directory)
                yield directory
                return
    raise OSError(None, f"{_MAX_ENGINES} engines of this model are using it", str(path))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """False: another process has it, or it is gone."""
    path = directory / _LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file), os.stat(path))  # nobody removed it meanwhile
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        yield is_ours
    finally:
        os.close(file)


def _check_private(directory: Path) -> None:
    """The one above it may be a volume that is open to all: nobody else can put a file in here."""
    status = os.stat(directory, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(None, "it is no directory that only this user can write to", str(directory))


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, PARTIAL)):
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _remove_if_empty(directory: Path) -> None:
    """Called by who has locked it."""
    with os.scandir(directory) as entries:
        if any(entry.name != _LOCK for entry in entries):
            return
    with contextlib.suppress(OSError):
        (directory / _LOCK).unlink()
        directory.rmdir()
