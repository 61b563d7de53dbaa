"""Routing blocks that the cache holds whole: the news of them, for the code that tells a gateway.

A routing block is a run of pool blocks, its parts. It is whole while every part can be found; on the host, if one of
them is there or on disk only. Parts are shared by prompts that part ways inside a run, but the last part belongs to one
routing block only, and stands for it here.

Nothing is kept per part: the pool knows which blocks follow which. It notes the hashes that go, and those that come
back before others or move; `changes` looks at the runs they belong to, once, by what the pool holds then. That finds
every change. A run that is no longer whole lost its last part, or one after which all are still there, and from that
one its last part is reached. A run that has become whole got its last part last, or one that had others after it.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.core.hashing import BlockHash
from penstock.core.tiers import Tier
from penstock.kv.pool import BlockPool


class RoutingChanges(NamedTuple):
    """Routing hashes, by where they are since now."""

    stored: list[int]  # on the device
    removed: list[int]
    on_host: list[int]  # part of it on the host only


class RoutingBlocks:
    def __init__(self, pool: BlockPool, size: int) -> None:
        assert size % pool.block_size == 0
        self.size = size
        self.parts = size // pool.block_size
        self._pool = pool
        self._names: dict[BlockHash, int] = {}  # last parts, from being published until their end is noticed
        self._told: dict[BlockHash, Tier] = {}  # the last parts of what is whole
        self.noted = pool.note_changes()  # blocks that came, went or moved

    def name(self, last_part: BlockHash, routing_hash: int) -> None:
        """Names the routing block that a last part ends, when that part is published."""
        self._names[last_part] = routing_hash
        self.noted.append(last_part)

    def name_of(self, last_part: BlockHash) -> int | None:
        """The routing block that this block ends, if it ends one."""
        return self._names.get(last_part)

    def changes(self) -> RoutingChanges | None:
        """Routing blocks that became whole, moved and are no longer whole, since the last call; None: nothing."""
        if not self.noted:
            return None
        changes = RoutingChanges([], [], [])
        for last_part in self._concerned():
            tier = self._pool.tier_of_run(last_part, self.parts)
            if tier is not self._told.get(last_part):
                self._tell(last_part, tier, changes)
            if tier is None and not self._pool.is_known(last_part):
                del self._names[last_part]
        return changes if any(changes) else None

    def _tell(self, last_part: BlockHash, tier: Tier | None, changes: RoutingChanges) -> None:
        name = self._names[last_part]
        if tier is None:
            del self._told[last_part]
            changes.removed.append(name)
            return
        self._told[last_part] = tier
        (changes.stored if tier is Tier.DEVICE else changes.on_host).append(name)

    def _concerned(self) -> list[BlockHash]:
        """The last parts of all runs that may have changed, in the order in which that happened."""
        found: dict[BlockHash, None] = {}
        passed: set[BlockHash] = set()
        for part in self.noted:
            if part in self._names:
                found[part] = None
            elif part not in passed:
                passed.add(part)
                self.noted += self._pool.following(part)  # they come up in this loop
        self.noted.clear()
        return list(found)
