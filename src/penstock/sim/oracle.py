"""The best place by full knowledge: what every cache holds and every queue comes to at the moment of arrival.

No gateway can know that; it is what routing by prefixes is measured against.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from penstock.sim.flight import Ask
from penstock.sim.prompts import RunHashes, TokenRun
from penstock.sim.replica import SimReplica

_WORTH = 4  # tokens of waiting that a token found is worth: those who come later are spared it too


def best_place(ask: Ask, number: int, replicas: Iterable[SimReplica]) -> str:
    """Where least is to be computed, for others first and then for it; of equals, who has the fewest requests."""

    @cache
    def hashes(size: int) -> list[bytes]:
        return RunHashes(TokenRun(number, ask.prompt_tokens, ask.names, size), size).hashes

    def left(replica: SimReplica) -> tuple[int, int]:
        size = replica.profile.block_tokens
        found = replica.cache.num_known(hashes(size)) * size if ask.names else 0
        computed = max(1, ask.prompt_tokens - found)
        return replica.queued_tokens + _WORTH * computed, replica.num_open

    return min(replicas, key=left).name
