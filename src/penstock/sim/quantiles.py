"""Quantiles of a stream in bounded memory: counts of values in buckets that are each one per cent wide."""

from __future__ import annotations

import math
from collections.abc import Iterable

_WIDTH = math.log(1.01)
_LEAST = 1e-6  # smaller values count as this


class Quantiles:
    """Quantiles that are off by half a per cent at most. Two of them add up."""

    __slots__ = ("_counts", "count", "most", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def add(self, value: float) -> None:
        bucket = int(math.log(value if value > _LEAST else _LEAST) / _WIDTH // 1)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        self.most = max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def at(self, share: float) -> float | None:
        """The value that so large a share of them does not exceed; None: there are none."""
        wanted = max(1, math.ceil(share * self.count))
        for bucket, up_to in self._cumulated():
            if up_to >= wanted:
                return min(math.exp((bucket + 0.5) * _WIDTH), self.most)
        return None

    def curve(self) -> list[tuple[float, float]]:
        """(value, share of them that is no larger), for a plot."""
        return [(math.exp((bucket + 0.5) * _WIDTH), up_to / self.count) for bucket, up_to in self._cumulated()]

    def _cumulated(self) -> Iterable[tuple[int, int]]:
        total = 0
        for bucket in sorted(self._counts):
            total += self._counts[bucket]
            yield bucket, total
