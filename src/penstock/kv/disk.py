"""Blocks on disk, below host memory: which of them are there, are being written, and are being read.

Integers and hashes only; files and threads are behind `BlockFiles`, whose news is taken between steps. A block that has
come to the host is written as soon as it is at rest there, oldest first and a few at a time; what the host must give up
before its turn is dropped. A block comes back by being read into the host's memory, while the sequence that wants it
waits. A read that fails is nobody's loss, and of one that takes longer than computing the same blocks the sequence
waits no longer: in both cases it computes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.hashing import BlockHash
from penstock.kv.chains import BlockChains

_KEEP = 0.9  # of what was known of a read's time, at every read
_TRY_EVERY = 32  # chances to read that are not worth it: one is taken, to see whether the disk has become faster
_MIN_PATIENCE_S = 0.1  # for a read, however fast the device computes
_PATIENCE_S = 5.0  # while nobody knows how fast it does


@dataclass(frozen=True, slots=True)
class Found:
    """A file was there when the engine started; they come oldest first."""

    own: BlockHash
    parent: BlockHash
    routing_hash: int | None = None  # of the routing block that it ends


@dataclass(frozen=True, slots=True)
class Written:
    own: BlockHash
    is_kept: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    own: BlockHash
    is_whole: bool  # False: there is no such file any longer
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Expired:
    own: BlockHash


DiskNews = Found | Written | Fetched | Expired


class BlockFiles(Protocol):
    """Files with one block each. Calls return at once; blocks of the host are counted from 0 here. Writes and removals
    happen in their order."""

    num_blocks: int  # that there is room for
    block_bytes: int  # of a file
    num_damaged: int  # files that failed their check, since the start
    num_errors: int  # of the operating system, since the start

    def write(self, own: BlockHash, parent: BlockHash, routing_hash: int | None, block: int) -> None: ...

    def fetch(self, own: BlockHash, block: int) -> None:
        """Read the file into this block."""

    def remove(self, own: BlockHash) -> None: ...

    def news(self) -> list[DiskNews]:
        """Some of what has happened since the last call; not all, if that is much."""

    def wait(self, timeout_s: float) -> None:
        """Waits until there may be news."""


class HostPort(Protocol):
    """Blocks in host memory, as the disk needs them."""

    num_blocks: int
    copy_s: float

    @property
    def computing_s(self) -> float | None: ...

    def __contains__(self, own: BlockHash) -> bool: ...

    def pin(self, own: BlockHash) -> tuple[int, BlockHash] | None: ...

    def unpin(self, block: int) -> None: ...

    def touch(self, own: BlockHash) -> None: ...

    def claim(self) -> int | None: ...

    def fill(self, block: int, own: BlockHash, parent: BlockHash) -> None: ...

    def give_back(self, block: int) -> None: ...


@dataclass(slots=True)
class _Read:
    block: int
    parent: BlockHash
    deadline_s: float
    is_awaited: bool = True


@dataclass
class DiskCounters:
    loaded_blocks: int = 0  # read into host memory
    dropped_blocks: int = 0  # that the host gave up before they were written, or that could not be written
    late_blocks: int = 0  # that came later than they would have been computed


class DiskBlocks:
    def __init__(
        self,
        files: BlockFiles,
        host: HostPort,
        *,
        routing_hash: Callable[[BlockHash], int | None] = lambda own: None,
        max_writes: int = 64,
    ) -> None:
        """`routing_hash`: of the routing block that a block ends. `max_writes`: blocks of the host that may be held for
        being written, at once."""
        self.files = files
        self.chains = BlockChains()
        self.counters = DiskCounters()
        self._host = host
        self._routing_hash = routing_hash
        self._max_writes = max(1, min(max_writes, host.num_blocks // 4, files.num_blocks))
        self._index: OrderedDict[BlockHash, None] = OrderedDict()  # the one used longest ago comes first
        self._offered: dict[BlockHash, None] = {}  # on the host and not on disk, the oldest first
        self._writing: dict[BlockHash, tuple[int, BlockHash]] = {}
        self._reading: dict[BlockHash, _Read] = {}
        self._read_s = 0.0  # of one block; 0: not measured yet
        self._chances = 0

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, own: BlockHash) -> bool:
        return own in self._index

    @property
    def is_reading(self) -> bool:
        """Whether it is reading for somebody who waits."""
        return any(read.is_awaited for read in self._reading.values())

    @property
    def is_writing(self) -> bool:
        return bool(self._writing or (self._offered and self.pays))

    @property
    def pays(self) -> bool:
        """Whether reading takes no longer than computing; assumed until something else is measured."""
        computing_s = self._host.computing_s
        return not self._read_s or computing_s is None or self._read_s + self._host.copy_s <= computing_s

    # -- writing

    def offer(self, own: BlockHash) -> None:
        """This block is on the host, and at rest."""
        if own not in self._index and own not in self._writing:
            self._offered[own] = None
            self._write()

    def leave_host(self, own: BlockHash) -> None:
        """The host gives it up."""
        self._offered.pop(own, None)
        if own not in self._index:
            self.counters.dropped_blocks += 1

    def _write(self) -> None:
        while self._offered and len(self._writing) < self._max_writes and self.pays:
            own = next(iter(self._offered))
            del self._offered[own]
            pinned = self._host.pin(own)
            if pinned is None:
                continue  # it moves, and will be offered again
            while self._index and len(self._index) + len(self._writing) >= self.files.num_blocks:
                self._forget(oldest := next(iter(self._index)))
                self.files.remove(oldest)
            block, parent = self._writing[own] = pinned
            self.files.write(own, parent, self._routing_hash(own), block)

    # -- reading

    def fetch(self, run: Sequence[tuple[BlockHash, BlockHash]], now: float) -> list[BlockHash]:
        """Begin to read those of a chain, each with its parent, that are on disk only; which ones. They are there, or
        it is known that they will not be, once they are in what `poll` returns."""
        if any(not read.is_awaited for read in self._reading.values()) or not self._is_worth_it():
            return []
        for own, _ in run:
            self._host.touch(own)
        num_here = sum(own in self._host for own, _ in run)
        room = min(self._host.num_blocks // 2, self._host.num_blocks - num_here - len(self._writing))
        wanted = [(own, parent) for own, parent in run if own in self._index and own not in self._host]
        started: list[BlockHash] = []
        computing_s = self._host.computing_s
        for own, parent in wanted[: max(0, room - len(self._reading))]:
            if own in self._reading or (block := self._host.claim()) is None:
                break
            patience_s = _PATIENCE_S if computing_s is None else max(_MIN_PATIENCE_S, len(wanted) * computing_s)
            self._reading[own] = _Read(block, parent, now + patience_s)
            self._index.move_to_end(own)
            self.files.fetch(own, block)
            started.append(own)
        return started

    def _is_worth_it(self) -> bool:
        if self.pays:
            return True
        self._chances += 1
        return self._chances % _TRY_EVERY == 0

    # -- news

    def poll(self, now: float) -> tuple[list[BlockHash], list[Found]]:
        """Take in what has happened: the blocks for which nobody need wait any longer, and files that were there when
        the engine started."""
        ended: list[BlockHash] = []
        found: list[Found] = []
        for news in self.files.news():
            match news:
                case Found(own, parent) if own not in self._index and own not in self._writing:
                    self._add(own, parent)
                    found.append(news)
                case Written(own, is_kept):
                    self._end_write(own, is_kept)
                case Fetched():
                    ended += self._end_read(news)
                case Expired(own) if own in self._index:
                    self._forget(own)
        for own, read in self._reading.items():
            if read.is_awaited and now >= read.deadline_s:
                read.is_awaited = False
                self.counters.late_blocks += 1
                ended.append(own)
        self._write()
        return ended, found

    def _end_write(self, own: BlockHash, is_kept: bool) -> None:
        block, parent = self._writing.pop(own)
        self._host.unpin(block)
        if is_kept:
            self._add(own, parent)
        else:
            self.counters.dropped_blocks += 1

    def _end_read(self, news: Fetched) -> list[BlockHash]:
        """The hash of the block that was read, if somebody still waits for it."""
        read = self._reading.pop(news.own)
        if news.is_whole:
            self.counters.loaded_blocks += 1
            self._read_s = _KEEP * self._read_s + (1 - _KEEP) * news.seconds if self._read_s else news.seconds
            self._host.fill(read.block, news.own, read.parent)
        else:
            self._host.give_back(read.block)
            if news.own in self._index:
                self._forget(news.own)
        return [news.own] if read.is_awaited else []

    def _add(self, own: BlockHash, parent: BlockHash) -> None:
        self._index[own] = None
        self.chains.add(own, parent)

    def _forget(self, own: BlockHash) -> None:
        del self._index[own]
        self.chains.remove(own)
