"""Finding a watermark in tokens: how strange they would be if nobody had put it there.

The keyed bits of different tokens after different contexts are independent in a text without the mark, so the
statistics below have exactly the distributions that their p-values come from, whatever the text; that is why a
repetition counts once. It knows the key and the tokens, and needs neither the model nor the prompt.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.watermark import Scheme, Seeding, Watermark, fraction_bits, fractions, mix, steps

SIGNIFICANT = 1e-4  # of unmarked texts, one in so many is taken for a marked one
ENOUGH_TOKENS = 100  # with fewer that count, a marked text may well not be significant

Ints = npt.NDArray[np.int64]


class Verdict(enum.StrEnum):
    FOUND = "watermarked"
    NOT_FOUND = "no watermark found"
    TOO_SHORT = "too short to tell"


@dataclass(frozen=True)
class Finding:
    scheme: Scheme
    num_tokens: int
    num_scored: int  # that count: each with a whole context before it, and not there before
    score: float  # green tokens, or the sum that the gumbel scheme makes large
    expected: float  # of the score, in an unmarked text
    z: float  # standard deviations above that
    p_value: float  # of a score at least so large in an unmarked text

    def verdict(self, significant: float = SIGNIFICANT) -> Verdict:
        if self.p_value <= significant:
            return Verdict.FOUND
        return Verdict.NOT_FOUND if self.num_scored >= ENOUGH_TOKENS else Verdict.TOO_SHORT


def detect(token_ids: list[int], watermark: Watermark) -> Finding:
    tokens = np.array(token_ids, np.int64)
    if len(tokens) <= watermark.width:
        return Finding(watermark.scheme, len(tokens), 0, 0.0, 0.0, 0.0, 1.0)
    contexts = np.lib.stride_tricks.sliding_window_view(tokens, watermark.width)[:-1]  # [positions, width]
    chosen = tokens[watermark.width :]
    if watermark.scheme is Scheme.GUMBEL:
        return _gumbel(watermark, contexts, chosen)
    return _green(watermark, contexts, chosen)


def _green(watermark: Watermark, contexts: Ints, chosen: Ints) -> Finding:
    bits = np.unique(_bits(watermark, contexts, chosen))  # equal bits are one token after one context, again
    count, gamma = len(bits), watermark.gamma
    green = int((fraction_bits(bits) < watermark.green_below).sum())
    z = (green - gamma * count) / math.sqrt(count * gamma * (1 - gamma))
    p_value = binomial_tail(green, count, gamma)
    return Finding(watermark.scheme, _length(contexts), count, green, gamma * count, z, p_value)


def _gumbel(watermark: Watermark, contexts: Ints, chosen: Ints) -> Finding:
    _, first = np.unique(contexts, axis=0, return_index=True)  # whoever made the text left repetitions to chance
    bits = fraction_bits(_bits(watermark, contexts[first], chosen[first]))
    score = float(-np.log1p(-fractions(bits)).sum())  # each is exponentially distributed
    count = len(first)
    return Finding(
        watermark.scheme,
        _length(contexts),
        count,
        score,
        count,
        (score - count) / math.sqrt(count),
        gamma_tail(score, count),
    )


def _length(contexts: Ints) -> int:
    return int(contexts.shape[0] + contexts.shape[1])


def _bits(watermark: Watermark, contexts: Ints, chosen: Ints) -> Ints:
    """Bits of each chosen token, as the sampler had them."""
    if watermark.seeding is Seeding.LEFT:
        seeds = np.array([watermark.seed(context) for context in contexts.tolist()], np.int64)
        left: Ints = mix(steps(chosen) + seeds)
        return left
    distinct, places = np.unique(contexts, return_inverse=True)
    by_token = np.array([watermark.seed((token_id,)) for token_id in distinct.tolist()], np.int64)
    pairs = mix(steps(chosen)[:, None] + by_token[places.reshape(contexts.shape)])  # [positions, width]
    least: Ints = mix(pairs.min(axis=1))
    return least


def binomial_tail(successes: int, trials: int, chance: float) -> float:
    """The chance of at least so many successes, exactly."""
    if successes <= 0:
        return 1.0
    counts = range(successes, trials + 1)
    whole = math.lgamma(trials + 1)
    return _sum_of_logs(
        [
            whole
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(chance)
            + (trials - k) * math.log1p(-chance)
            for k in counts
        ]
    )


def gamma_tail(total: float, terms: int) -> float:
    """The chance that so many exponential numbers come to more than `total`: that fewer events happen in that time."""
    if total <= 0:
        return 1.0
    return _sum_of_logs([k * math.log(total) - total - math.lgamma(k + 1) for k in range(terms)])


def _sum_of_logs(logs: list[float]) -> float:
    largest = max(logs, default=-math.inf)
    return min(1.0, math.exp(largest) * math.fsum(math.exp(one - largest) for one in logs)) if logs else 0.0
