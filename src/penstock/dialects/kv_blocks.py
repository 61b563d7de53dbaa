"""An engine's blocks as routing blocks: its names are forgotten and its tokens hashed anew, as the router hashes them.

An engine's block is smaller than a routing block (16 to 64 tokens of 256), so the tokens of one are gathered along
the chain of parents; it is there while all of them are. Engines tell what changes, never what there is: of a block
whose parent was stored before this gateway listened nothing can be said, and `is_approximate` says so.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from penstock.core.hashing import ROUTING_TOKENS, chain_routing, routing_root
from penstock.dialects.kv_events import Batch, Cleared, Ignored, Name, Removed, Stored

_Key = Name | tuple[int, int, Name]  # with the rank and the group, where there are many
_WIDTH = array("I").itemsize


class _Run:
    """One chain of blocks that spells a routing block."""

    __slots__ = ("members", "name")

    def __init__(self, name: int, members: list[_Block]) -> None:
        self.name = name
        self.members = members


class _Block:
    __slots__ = ("media", "parent", "routing", "runs", "start", "tokens")

    def __init__(self, parent: _Key | None, start: int, tokens: bytes, routing: int) -> None:
        self.parent = parent
        self.start = start  # tokens of the prompt before it
        self.tokens = tokens
        self.routing = routing  # the last routing block that ends in it or before it, or the root
        self.media: tuple[str, ...] = ()  # where it is
        self.runs: _Run | set[_Run] | None = None  # that it is part of: mostly one, which needs no set

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _WIDTH

    def join(self, run: _Run) -> None:
        if self.runs is None:
            self.runs = run
        elif isinstance(self.runs, _Run):
            self.runs = {self.runs, run}
        else:
            self.runs.add(run)

    def leave(self, run: _Run) -> None:
        if isinstance(self.runs, set):
            self.runs.discard(run)
        elif self.runs is run:
            self.runs = None

    def all_runs(self) -> list[_Run]:
        if self.runs is None:
            return []
        return [self.runs] if isinstance(self.runs, _Run) else list(self.runs)


class Changes:
    """What a router's index has to be told, in this order: all is gone, these are gone, these are there."""

    __slots__ = ("is_cleared", "removed", "stored")

    def __init__(self) -> None:
        self.is_cleared = False
        self.removed: dict[int, None] = {}
        self.stored: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self.is_cleared or self.stored or self.removed)


class EngineBlocks:
    def __init__(
        self, *, size: int = ROUTING_TOKENS, namespace_of: Callable[[str], str] = str, max_blocks: int = 1 << 20
    ) -> None:
        """`namespace_of` makes of a cache's salt the router's namespace. Beyond `max_blocks` nothing new is kept."""
        self._size = size
        self._namespace_of = namespace_of
        self._max_blocks = max_blocks
        self._blocks: dict[_Key, _Block] = {}
        self._counts: Counter[int] = Counter()  # whole runs of a routing block
        self._ignored: set[int] = set()  # groups of layers
        self.is_approximate = False

    def __len__(self) -> int:
        """Routing blocks that are there."""
        return len(self._counts)

    @property
    def num_blocks(self) -> int:
        """The engine's own."""
        return len(self._blocks)

    def hashes(self) -> list[int]:
        return list(self._counts)

    def apply(self, batch: Batch, changes: Changes) -> None:
        for event in batch.events:
            match event:
                case Stored():
                    self._store(event, batch.rank, changes)
                case Removed():
                    self._remove(event, batch.rank, changes)
                case Cleared():
                    self.clear(changes)
                case Ignored():
                    self._ignored.add(event.group)

    def clear(self, changes: Changes) -> None:
        """The cache is empty, and so known exactly."""
        changes.is_cleared = True
        changes.stored.clear()
        changes.removed.clear()
        self._blocks.clear()
        self._counts.clear()
        self.is_approximate = False

    def _store(self, event: Stored, rank: int, changes: Changes) -> None:
        if event.group in self._ignored:
            return
        parent = None if event.parent is None else _key(rank, event.group, event.parent)
        if parent is None:
            start = 0
            routing = routing_root(self._namespace_of(event.salt), adapter=event.adapter, media=event.media)
        elif (before := self._blocks.get(parent)) is not None:
            start, routing = before.end, before.routing
        else:
            self.is_approximate = True
            return
        tokens, width = event.token_ids.tobytes(), event.block_size * _WIDTH
        for index, name in enumerate(event.names):
            key = _key(rank, event.group, name)
            block = self._blocks.get(key)
            if block is None:
                if len(self._blocks) >= self._max_blocks:
                    self.is_approximate = True
                    return
                block = _Block(parent, start, tokens[index * width : (index + 1) * width], routing)
                self._blocks[key] = block
                if block.end // self._size > start // self._size:
                    self._complete(block, changes)
            if event.medium not in block.media:
                block.media += (event.medium,)
            parent, start, routing = key, block.end, block.routing

    def _complete(self, block: _Block, changes: Changes) -> None:
        """Names the routing blocks that end in this one."""
        first = block.start // self._size * self._size  # there the first of them begins
        members = [block]
        while members[-1].start > first:
            parent = members[-1].parent
            found = self._blocks.get(parent) if parent is not None else None
            if found is None:
                self.is_approximate = True
                return
            members.append(found)
        members.reverse()
        tokens = array("I", b"".join([member.tokens for member in members])).tolist()
        chain = chain_routing(block.routing, tokens[first - members[0].start :], self._size)
        for index, name in enumerate(chain):
            begin, end = first + index * self._size, first + (index + 1) * self._size
            run = _Run(name, [member for member in members if member.start < end and member.end > begin])
            for member in run.members:
                member.join(run)
            self._counts[name] += 1
            if self._counts[name] == 1:
                changes.stored[name] = None
        block.routing = chain[-1]

    def _remove(self, event: Removed, rank: int, changes: Changes) -> None:
        for name in event.names:
            key = _key(rank, event.group, name)
            block = self._blocks.get(key)
            if block is None:
                continue
            block.media = tuple(medium for medium in block.media if medium != event.medium)
            if not block.media:
                del self._blocks[key]
                self._dissolve(block, changes)

    def _dissolve(self, block: _Block, changes: Changes) -> None:
        for run in block.all_runs():
            for member in run.members:
                member.leave(run)
            self._counts[run.name] -= 1
            if self._counts[run.name] == 0:
                del self._counts[run.name]
                if run.name in changes.stored:
                    del changes.stored[run.name]
                else:
                    changes.removed[run.name] = None


def _key(rank: int, group: int, name: Name) -> _Key:
    return (rank, group, name) if rank or group else name
