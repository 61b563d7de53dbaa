"""Times as parts of their target, counted in bins that have bounds where they matter: at 0.8, at 1 and at 2."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BOUNDS: tuple[float, ...] = tuple(
    sorted([0.8, *(2.0 ** (k / 8) for k in range(-40, 41))])
)  # a thirtieth to thirty times, by 9 %
NUM_BINS = len(BOUNDS) + 1


def bin_of(part: float) -> int:
    return bisect_left(BOUNDS, part)


def quantile(counts: Sequence[int], q: float) -> float | None:
    """The part of the target that a share `q` of the times keeps; None: there are none."""
    total = sum(counts)
    if not total:
        return None
    left = q * total
    for place, count in enumerate(counts):
        if count and left <= count:
            if place == len(BOUNDS):
                return BOUNDS[-1]
            low = BOUNDS[place - 1] if place else 0.0
            return low + (BOUNDS[place] - low) * left / count
        left -= count
    return BOUNDS[-1]
