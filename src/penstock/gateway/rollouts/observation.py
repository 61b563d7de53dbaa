"""Observation of one answer at its end, as a rollout counts it: plain numbers, without clock or socket.

The event loop takes these down as they are; the arithmetic is done by whoever folds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import NamedTuple

from penstock.core.rollout import Arm, Metric, RolloutOrder
from penstock.core.rollout_strata import bucket, stratum

_LOAD_MATTERS = frozenset({Metric.TTFT, Metric.TPOT, Metric.LATENCY, Metric.DEVICE_TIME, Metric.COST})

Values = Sequence[tuple[Metric, float]]


class Timing(NamedTuple):
    """Times of one answer, and its conditions. None: nobody said."""

    in_flight: int  # other requests at its replica, in the mean of the answer
    uncached_tokens: int  # of its prompt
    output_tokens: int
    ttft_s: float | None = None  # of streams
    total_s: float | None = None
    device_s: float | None = None
    hour_price: float | None = None  # of its version's devices
    cost: float | None = None  # by the price of its pool, where devices have none

    def times(self) -> Iterator[tuple[Metric, float]]:
        """All that can be told, each above zero."""
        tokens = self.output_tokens or self.uncached_tokens  # embeddings have no output
        for metric, value in (
            (Metric.TTFT, self.ttft_s),
            (Metric.TPOT, self._tpot_s()),
            (Metric.LATENCY, self.total_s),
            (Metric.OUTPUT_TOKENS, self.output_tokens),
            (Metric.DEVICE_TIME, self.device_s / tokens if self.device_s is not None and tokens else None),
            (Metric.COST, self._cost_per_token(tokens)),
        ):
            if value is not None and value > 0.0:
                yield metric, value

    def stratum(self, metric: Metric) -> str:
        return stratum(
            metric,
            uncached_tokens=self.uncached_tokens,
            in_flight=self.in_flight,
            output_tokens=self.output_tokens,
        )

    def _tpot_s(self) -> float | None:
        if self.ttft_s is None or self.total_s is None or self.output_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1)

    def _cost_per_token(self, tokens: int) -> float | None:
        if not tokens:
            return None
        if self.hour_price is not None and self.device_s is not None:
            return self.device_s * self.hour_price / 3600.0 / tokens
        return self.cost / tokens if self.cost is not None else None


class Observation(NamedTuple):
    order: RolloutOrder  # as it was when the request began: its step counts
    arm: Arm
    at: float  # the end, in seconds since 1970
    tenant: str
    values: Values = ()  # logarithms of ratios, where `arm` is PAIR
    timing: Timing | None = None  # None: not to be measured, or there was no answer
    request_id: str = ""  # of a client's answer: feedback may come for it


def pair_ratios(old: Timing, new: Timing) -> list[tuple[Metric, float]]:
    """Logarithms of the new version's times over the old one's, where conditions were alike: as many others at the
    replica, and for the first token as much of the prompt to compute."""
    before, found = dict(old.times()), []
    is_alike = bucket(old.in_flight) == bucket(new.in_flight)
    is_as_warm = bucket(old.uncached_tokens) == bucket(new.uncached_tokens)
    for metric, value in new.times():
        if metric not in before or (metric in _LOAD_MATTERS and not is_alike):
            continue
        if metric in (Metric.TTFT, Metric.DEVICE_TIME, Metric.COST) and not is_as_warm:
            continue
        found.append((metric, log(value / before[metric])))
    return found
