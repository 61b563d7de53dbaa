"""Admissions as an outsider counts them, and the one law they must obey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Admission(NamedTuple):
    asked: float  # not admitted before this …
    answered: float  # … nor after this
    tokens: float


def worst_excess(admissions: Iterable[Admission], per_s: float, burst: float) -> float:
    """By how much the fullest window breaks `per_s * T + burst`; at most zero where the law holds.

    A window counts only what was surely admitted in it: asked after it began, answered before it ended.
    """
    by_answer = np.array(sorted(admissions, key=lambda admission: admission.answered))
    asked, answered, tokens = by_answer.T
    worst = float("-inf")
    for begin in np.unique(asked):
        counts = asked >= begin
        totals = np.cumsum(np.where(counts, tokens, 0.0))
        worst = max(worst, float(np.max((totals - per_s * (answered - begin))[counts])) - burst)
    return worst
