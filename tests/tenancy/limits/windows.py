"""Admissions as an outsider counts them, and the one law they must obey."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Admission(NamedTuple):
    asked: float  # not admitted before this …
    answered: float  # … nor after this
    tokens: float


def fullest_window(admissions: Iterable[Admission], length_s: float = 60.0) -> float:
    """Tokens in the fullest of all windows of this length.

    A window counts only what was surely admitted in it: asked after it began, answered before it ended.
    """
    by_answer = np.array(sorted(admissions, key=lambda admission: admission.answered))
    if not len(by_answer):
        return 0.0
    asked, answered, tokens = by_answer.T
    return max(float(tokens[(asked >= begin) & (answered < begin + length_s)].sum()) for begin in np.unique(asked))
