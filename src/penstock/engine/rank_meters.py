"""Figures of a model's ranks, from what they say of themselves every few seconds and what the engine says of its steps.

A rank counts its steps and their time. The engine says how many tokens of context a step reads on average.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.measurements import EngineTotals
from penstock.core.ranks import RankFigures, RankReading, RankReads


@dataclass
class _Meter:
    """One rank's rates, between the last two readings that had steps between them."""

    reading: RankReading
    steps: int  # of the engine, when the reading came
    read_tokens: int
    steps_per_s: float | None = None  # of its busy time
    read_per_step: float = 0.0  # tokens of context
    communication: float | None = None

    def take(self, reading: RankReading, steps: int, read_tokens: int) -> None:
        before, now = self.reading.usage, reading.usage
        busy_s = now.busy_s - before.busy_s
        if busy_s > 0:
            if steps > self.steps:
                self.read_per_step = (read_tokens - self.read_tokens) / (steps - self.steps)
            self.steps_per_s = (now.num_steps - before.num_steps) / busy_s
            if now.communication_s is not None and before.communication_s is not None:
                self.communication = min(1.0, (now.communication_s - before.communication_s) / busy_s)
        self.reading, self.steps, self.read_tokens = reading, steps, read_tokens

    def mbu(self, reads: RankReads, bytes_per_s: float) -> float | None:
        if self.steps_per_s is None:
            return None
        return self.steps_per_s * (reads.weight_bytes + self.read_per_step * reads.kv_token_bytes) / bytes_per_s


class RankMeters:
    """All ranks of the model, as they last said; none: there is one."""

    def __init__(self) -> None:
        self._meters: dict[int, _Meter] = {}

    @property
    def readings(self) -> list[RankReading]:
        return [self._meters[rank].reading for rank in sorted(self._meters)]

    def take(self, reading: RankReading, steps: int, totals: EngineTotals) -> None:
        """`steps` and `totals`: of the engine, now."""
        meter = self._meters.get(reading.rank)
        if meter is None:
            self._meters[reading.rank] = _Meter(reading, steps, totals.read_tokens)
        else:
            meter.take(reading, steps, totals.read_tokens)

    def clear(self) -> None:
        self._meters.clear()

    def figures(self, reads: tuple[RankReads, ...], bytes_per_s: float | None) -> tuple[RankFigures, ...]:
        """`reads`: by rank, if somebody knows them; `bytes_per_s`: the most that all their devices can, likewise."""
        return tuple(
            RankFigures(
                rank,
                meter.reading.node,
                meter.reading.usage.device,
                meter.reading.usage.memory_bytes,
                meter.mbu(reads[rank], bytes_per_s / len(reads)) if rank < len(reads) and bytes_per_s else None,
                meter.communication,
                meter.reading.usage.is_estimated,
            )
            for rank, meter in sorted(self._meters.items())
        )
