"""News of a simulated replica's cache, kept until somebody asks: where routing blocks are that came or moved."""

from __future__ import annotations

from penstock.core.tiers import Tier
from penstock.engine.messages import CacheChanges


class CacheNews:
    def __init__(self) -> None:
        self._places: dict[int, Tier | None] = {}

    def add(self, changes: CacheChanges) -> None:
        self._places.update(dict.fromkeys(changes.removed))
        self._places.update(dict.fromkeys(changes.stored, Tier.DEVICE))
        self._places.update(dict.fromkeys(changes.on_host, Tier.HOST))

    def take(self) -> dict[Tier | None, list[int]]:
        """All since the last call, by where they are; None: no longer there."""
        places, self._places = self._places, {}
        found: dict[Tier | None, list[int]] = {Tier.DEVICE: [], Tier.HOST: [], None: []}
        for routing_hash, tier in places.items():
            found[tier].append(routing_hash)
        return found
