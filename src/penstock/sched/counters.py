"""Counters of what a scheduler has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    """Facts since the start, for whoever publishes them."""

    preemptions: int = 0
    prompt_tokens: int = 0  # of sequences that were let in for the first time, output made elsewhere included
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    forced_tokens: int = 0  # of those, by a guide: nobody chose them
    recomputed_tokens: int = 0  # that a sequence had before it was preempted, and that the cache had lost
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of those: each saved its sequence a step

    @property
    def work(self) -> int:
        """Tokens computed and tokens chosen, each counting one: as `fairness` counts."""
        return self.prompt_tokens - self.cached_tokens + self.recomputed_tokens + 2 * self.generated_tokens
