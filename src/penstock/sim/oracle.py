"""A place by full knowledge: what every cache holds, what every queue comes to, how long every answer will be.

No gateway can know that. It is greedy all the same: it takes the place where this request ends soonest, at once, and
knows nothing of those who come later. So it is a yardstick for routing, and no bound on what can be reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from penstock.capacity.model_bytes import pairs
from penstock.sim.flight import Ask
from penstock.sim.replica import SimReplica
from penstock.sim.sim_prompts import RunHashes, TokenRun

_SHARED = 4.0  # what is computed of its prompt counts so many times: others wait for it too, and find it later


def best_place(ask: Ask, number: int, replicas: Iterable[SimReplica]) -> str:
    """Returns where it ends soonest; of equals, the one with the fewest requests, and then with the least work done."""

    @cache
    def hashes(size: int) -> list[bytes]:
        return RunHashes(TokenRun(number, ask.prompt_tokens, ask.names, size), size).hashes

    def cost(replica: SimReplica) -> tuple[float, int, float]:
        size, step = replica.profile.block_tokens, replica.profile.cost
        found = replica.cache.num_known(hashes(size)) * size if ask.names else 0
        found = min(found, ask.prompt_tokens - 1)
        token_s = step.token_s + step.exchange_s
        prompt_s = (ask.prompt_tokens - found) * token_s + pairs(found, ask.prompt_tokens) * step.pair_s
        open_context, num_open = replica.context_tokens, replica.num_open
        mean_context = open_context / max(1, num_open)
        wait_s = replica.queued_tokens * (token_s + step.pair_s * mean_context / 2)
        slower_s = (
            num_open * (token_s + step.sequence_s + step.head_s) + open_context * step.context_s
        )  # each of its steps
        return wait_s + _SHARED * prompt_s + ask.output_tokens * slower_s, num_open, replica.work_s

    return min(replicas, key=cost).name
