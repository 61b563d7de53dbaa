"""The distributions a sampler is meant to follow, written out plainly in numpy, and a test of what was drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.sampling import SamplingParams

Floats = npt.NDArray[np.float64]


def distribution(logits: Sequence[float], params: SamplingParams) -> Floats:
    """Returns each token's probability after temperature, top-k, top-p and min-p, in this order."""
    weights = np.exp((np.array(logits, np.float64) - max(logits)) / params.temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: params.top_k] if params.top_k is not None else order
    shares = weights[kept] / weights[kept].sum()
    nucleus = [i for i in range(len(kept)) if shares[:i].sum() < params.top_p]
    survivors = [kept[i] for i in nucleus if shares[i] >= params.min_p * shares[0]]
    probabilities = np.zeros(len(logits))
    probabilities[survivors] = weights[survivors]
    return probabilities / probabilities.sum()


def assert_drawn_from(probabilities: Floats, drawn: Sequence[int]) -> None:
    """A chi-square test, five standard deviations wide; and nothing that was impossible was drawn."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = probabilities[possible] * len(drawn)
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5
