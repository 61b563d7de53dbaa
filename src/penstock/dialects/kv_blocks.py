"""An engine's blocks as routing blocks: its names are forgotten and its tokens hashed anew, as the router hashes them.

An engine's block is smaller than a routing block (16 to 64 tokens of 256), so the tokens of one are gathered along
the chain of parents; it is there while all of them are, and on the device while all of them are on it. Engines tell
what changes, never what there is: of a block whose parent was stored before this gateway listened nothing can be said,
and `is_approximate` says so.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable

from penstock.core.hashing import ROUTING_TOKENS, chain_routing, routing_root
from penstock.core.tiers import Tier
from penstock.dialects.kv_events import DEVICE, Batch, Cleared, Ignored, Name, Removed, Stored

_Key = Name | tuple[int, int, Name]  # with the rank and the group, where there are many
_WIDTH = array("I").itemsize


class _Run:
    """One chain of blocks that spells a routing block."""

    __slots__ = ("members", "name", "num_off")

    def __init__(self, name: int, members: list[_Block]) -> None:
        self.name = name
        self.members = members
        self.num_off = sum(not member.is_on_device for member in members)  # the device


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
    def is_on_device(self) -> bool:
        return DEVICE in self.media

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
    """Changes that a router's index has to be told: all is gone, then where each of these is."""

    __slots__ = ("_before", "is_cleared", "on_host", "removed", "stored")

    def __init__(self) -> None:
        self.is_cleared = False
        self.removed: dict[int, None] = {}
        self.stored: dict[int, None] = {}  # on the device
        self.on_host: dict[int, None] = {}
        self._before: dict[int, Tier | None] = {}  # where each was, as far as the index knows

    def __bool__(self) -> bool:
        return bool(self.is_cleared or self.stored or self.on_host or self.removed)

    def clear(self) -> None:
        self.is_cleared = True
        for names in (self.removed, self.stored, self.on_host, self._before):
            names.clear()

    def say(self, name: int, before: Tier | None, now: Tier | None) -> None:
        for names in (self.removed, self.stored, self.on_host):
            names.pop(name, None)
        if now is not self._before.setdefault(name, before):
            target = self.stored if now is Tier.DEVICE else self.on_host if now is Tier.HOST else self.removed
            target[name] = None


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
        self._off: Counter[int] = Counter()  # those of them that are not all on the device
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
        changes.clear()
        self._blocks.clear()
        self._counts.clear()
        self._off.clear()
        self.is_approximate = False

    def _store(self, event: Stored, rank: int, changes: Changes) -> None:
        if event.group in self._ignored:
            return
        if not event.token_ids:
            for name in event.names:
                if (known := self._blocks.get(_key(rank, event.group, name))) is not None:
                    self._put(known, event.medium, changes)
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
                block.media = (event.medium,)
                self._blocks[key] = block
                if block.end // self._size > start // self._size:
                    self._complete(block, changes)
            self._put(block, event.medium, changes)
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
            self._count(name, 1, 1 if run.num_off else 0, changes)
        block.routing = chain[-1]

    def _remove(self, event: Removed, rank: int, changes: Changes) -> None:
        for name in event.names:
            key = _key(rank, event.group, name)
            block = self._blocks.get(key)
            if block is None:
                continue
            media = tuple(medium for medium in block.media if medium != event.medium)
            if media:
                self._move(block, media, changes)
            else:
                del self._blocks[key]
                self._dissolve(block, changes)

    def _put(self, block: _Block, medium: str, changes: Changes) -> None:
        if medium not in block.media:
            self._move(block, (*block.media, medium), changes)

    def _move(self, block: _Block, media: tuple[str, ...], changes: Changes) -> None:
        was_on_device, block.media = block.is_on_device, media
        if block.is_on_device == was_on_device:
            return
        step = -1 if block.is_on_device else 1
        for run in block.all_runs():
            run.num_off += step
            if run.num_off == (step + 1) // 2:  # the last of its blocks came, or the first went
                self._count(run.name, 0, step, changes)

    def _dissolve(self, block: _Block, changes: Changes) -> None:
        for run in block.all_runs():
            for member in run.members:
                member.leave(run)
            self._count(run.name, -1, -1 if run.num_off else 0, changes)

    def _tier(self, name: int) -> Tier | None:
        count = self._counts.get(name, 0)
        if not count:
            return None
        return Tier.DEVICE if count > self._off.get(name, 0) else Tier.HOST

    def _count(self, name: int, runs: int, off: int, changes: Changes) -> None:
        """There are so many more runs of a routing block, so many more of them not all on the device."""
        before = self._tier(name)
        for counter, more in ((self._counts, runs), (self._off, off)):
            counter[name] += more
            if not counter[name]:
                del counter[name]
        if (now := self._tier(name)) is not before:
            changes.say(name, before, now)


def _key(rank: int, group: int, name: Name) -> _Key:
    return (rank, group, name) if rank or group else name
