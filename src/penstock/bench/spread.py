"""The spread of values: mean and percentiles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Spread:
    mean: float
    p50: float
    p95: float
    p99: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None: of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (_ranked(ordered, percent) for percent in (50, 95, 99))
        return cls(fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1], len(ordered))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Returns the percentile, linear between the two nearest ranks; None: there are no values."""
    return _ranked(sorted(values), percent) if values else None


def _ranked(ordered: Sequence[float], percent: float) -> float:
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
