"""Which routing blocks the cache holds whole: the news of it, for whoever tells a gateway.

A routing block is a run of pool blocks, its parts. It is whole while every part can be found. Parts are shared by
prompts that part ways inside a run, but the last part belongs to one routing block only, and stands for it here.

Nothing is kept per part: the pool knows which blocks follow which. It notes the hashes that go, and those that come
back before others; `changes` looks at the runs they belong to, once, by what the pool holds then. That finds every
change. A run that is no longer whole lost its last part, or one after which all are still there, and from that one its
last part is reached. A run that has become whole got its last part last, or one that had others after it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.hashing import BlockHash
from penstock.kv.pool import BlockPool


class RoutingChanges(NamedTuple):
    stored: list[int]  # routing hashes
    removed: list[int]


class RoutingBlocks:
    def __init__(self, pool: BlockPool, size: int) -> None:
        assert size % pool.block_size == 0
        self.size = size
        self.parts = size // pool.block_size
        self._pool = pool
        self._names: dict[BlockHash, int] = {}  # last parts, from being published until their end is noticed
        self._whole: set[BlockHash] = set()  # the last parts of what was told
        self._noted = pool.note_changes()

    def name(self, last_part: BlockHash, routing_hash: int) -> None:
        """Whoever publishes a last part says which routing block it ends."""
        self._names[last_part] = routing_hash
        self._noted.append(last_part)

    def changes(self) -> RoutingChanges | None:
        """What became whole and what is no longer, since the last call; None: nothing."""
        if not self._noted:
            return None
        stored: list[int] = []
        removed: list[int] = []
        for last_part in self._concerned():
            is_whole = self._pool.has_run(last_part, self.parts)
            if is_whole and last_part not in self._whole:
                self._whole.add(last_part)
                stored.append(self._names[last_part])
            elif not is_whole and last_part in self._whole:
                self._whole.remove(last_part)
                removed.append(self._names[last_part])
            if not is_whole and self._pool.find(last_part) is None:
                del self._names[last_part]
        return RoutingChanges(stored, removed) if stored or removed else None

    def _concerned(self) -> list[BlockHash]:
        """The last parts of all runs that may have changed, in the order in which that happened."""
        found: dict[BlockHash, None] = {}
        for part in self._noted:
            if part in self._names:
                found[part] = None
            else:
                self._noted += self._pool.following(part)  # they come up in this loop
        self._noted.clear()
        return list(found)
