"""The capacity profile: how many requests a second one replica serves within the SLO, and what clients see at a rate.

The arithmetic is `penstock plan`'s (`capacity.steady`). Its coefficients come from a model's shape and a GPU's
datasheet, or from what replicas report. Answers are kept by mix, rounded to about two percent, so that asking is cheap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist, median
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from penstock.capacity.demand import Demand as LengthSample
from penstock.capacity.demand import Target
from penstock.capacity.steady import Engine, Limits
from penstock.capacity.step_times import StepTimes
from penstock.core.slo import Slo

MAX_SLOWDOWN, MAX_SPEEDUP = 1.5, 1.1  # what was measured moves the profile no further
_STEP = math.log(1.02)  # of the rounding: two percent
_SIGMA = math.sqrt(math.log(2))  # lengths are lognormal with a coefficient of variation of one
_QUANTILES = [math.exp(_SIGMA * NormalDist().inv_cdf((i + 0.5) / 8)) for i in range(8)]
_LENGTHS = [each * 8 / sum(_QUANTILES) for each in _QUANTILES]
_PAIRING = (3, 6, 1, 4, 7, 2, 5, 0)  # outputs are as good as independent of prompts
_MAX_KEPT = 10_000  # answers
_UNTARGETED = 0.7  # of an engine's saturation, where not even an idle replica keeps the SLO


class Mix(NamedTuple):
    """Mean request of a pool."""

    prompt_tokens: float
    output_tokens: float
    cached_share: float = 0.0


class ReplicaCosts(Struct, frozen=True, omit_defaults=True):
    """Seconds of a step's parts, as in `capacity.step_cost`, and limits of one replica."""

    fixed_s: float  # of any step
    read_s: float  # weights
    linear_token_s: float
    kv_tokens: int
    head_token_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    kv_token_s: float = 0.0
    sequence_s: float = 0.0
    max_num_seqs: int = 256
    chunk_tokens: int = 8192

    @classmethod
    def from_step_cost(cls, cost: StepTimes, limits: Limits) -> Self:
        return cls(
            fixed_s=cost.fixed_s,
            read_s=cost.read_s,
            linear_token_s=cost.linear_token_s,
            head_token_s=cost.head_token_s,
            token_s=cost.token_s,
            pair_s=cost.pair_s,
            kv_token_s=cost.kv_token_s,
            sequence_s=cost.sequence_s,
            kv_tokens=limits.kv_tokens,
            max_num_seqs=limits.max_num_seqs,
            chunk_tokens=limits.chunk_tokens,
        )

    @classmethod
    def from_reports(cls, reports: Iterable[ReplicaReport]) -> Self | None:
        """Medians over replicas, so that one odd report changes nothing; None: nobody has reported enough."""
        usable = [each for each in reports if each.prefill_tokens_per_s > 0 and each.steps and each.kv_tokens > 0]
        if not usable:
            return None
        lines = [_fit_line(each.steps) for each in usable]
        base_s, sequence_s = (median(values) for values in zip(*lines, strict=True))
        return cls(
            # Of a step with few sequences most is reading weights, which products of few tokens hide behind.
            fixed_s=0.2 * base_s,
            read_s=0.8 * base_s,
            linear_token_s=1 / median(each.prefill_tokens_per_s for each in usable),
            sequence_s=sequence_s,
            kv_tokens=int(median(each.kv_tokens for each in usable)),
            max_num_seqs=int(median(each.max_num_seqs for each in usable)),
            chunk_tokens=int(median(each.chunk_tokens for each in usable)),
        )

    def scaled(self, slowdown: float) -> Self:
        """Every second `slowdown` times as long."""
        names = ("fixed_s", "read_s", "linear_token_s", "head_token_s", "token_s", "pair_s", "kv_token_s", "sequence_s")
        return msgspec.structs.replace(self, **{name: getattr(self, name) * slowdown for name in names})


class ReplicaReport(Struct, frozen=True, omit_defaults=True):
    """Measurements of one replica, by itself."""

    prefill_tokens_per_s: float = 0.0  # while it computes prompts
    steps: tuple[tuple[float, float], ...] = ()  # (sequences that decode, seconds of the step)
    kv_tokens: int = 0
    max_num_seqs: int = 256
    chunk_tokens: int = 8192


class Predicted(NamedTuple):
    """Latency and load of one replica at a rate, as its clients see it. p: the SLO's quantile."""

    ttft_p_s: float
    tpot_p_s: float
    kv_usage: float
    utilisation: float


class CapacityProfile:
    def __init__(self, costs: ReplicaCosts) -> None:
        self.costs = costs
        self._engines: dict[tuple[int, ...], Engine] = {}
        self._rates: dict[tuple[int, ...], float] = {}
        self._predicted: dict[tuple[int, ...], Predicted] = {}
        self._slo: Slo | None = None

    def max_rate(self, mix: Mix, slo: Slo, slowdown: float = 1.0) -> float:
        """Requests a second of one replica within the SLO. Where not even an idle replica keeps it: within reason."""
        key = self._key(mix, slo, slowdown)
        if (rate := self._rates.get(key)) is None:
            engine = self._engine(key, slo)
            rate = engine.max_rate()[0]
            if rate == 0.0:
                limits = Limits(10**12, self.costs.max_num_seqs, self.costs.chunk_tokens)
                rate = _UNTARGETED * self._make_engine(key, Target(), limits).max_rate()[0]
            self._rates[key] = rate
        return rate

    def saturation(self, mix: Mix, slo: Slo, slowdown: float = 1.0) -> float:
        """Requests a second that a replica with a queue works off."""
        return self._engine(self._key(mix, slo, slowdown), slo).saturation

    def predict(self, mix: Mix, slo: Slo, rate: float, slowdown: float = 1.0) -> Predicted:
        key = self._key(mix, slo, slowdown)
        steps = _steps(rate)
        found = self._predicted.get((*key, steps))
        if found is None:
            engine = self._engine(key, slo)
            expected = engine.expected(math.exp(steps * _STEP))
            prompt, output = (math.exp(each * _STEP) for each in key[:2])
            found = self._predicted[(*key, steps)] = Predicted(
                expected.ttft_p_s,
                expected.tpot_p_s if expected.tpot_p_s is not None else 0.0,
                expected.num_decodes * (prompt + output / 2) / self.costs.kv_tokens,
                expected.utilisation,
            )
        return found

    def _key(self, mix: Mix, slo: Slo, slowdown: float) -> tuple[int, ...]:
        if slo is not self._slo:
            if self._slo is not None and slo != self._slo:
                self._forget()
            self._slo = slo
        if len(self._predicted) > _MAX_KEPT or len(self._engines) > _MAX_KEPT:
            self._forget()
        shared = round(50 * min(0.98, max(0.0, mix.cached_share)))
        return _steps(mix.prompt_tokens), _steps(mix.output_tokens), shared, _steps(slowdown)

    def _forget(self) -> None:
        for kept in (self._engines, self._rates, self._predicted):
            kept.clear()

    def _engine(self, key: tuple[int, ...], slo: Slo) -> Engine:
        if (engine := self._engines.get(key)) is None:
            target = Target(slo.ttft_s, slo.tpot_s, min(0.999, max(0.5, slo.quantile)))
            limits = Limits(self.costs.kv_tokens, self.costs.max_num_seqs, self.costs.chunk_tokens)
            engine = self._engines[key] = self._make_engine(key, target, limits)
        return engine

    def _make_engine(self, key: tuple[int, ...], target: Target, limits: Limits) -> Engine:
        prompt, output = (math.exp(each * _STEP) for each in key[:2])
        lengths = tuple(
            (max(1, round(prompt * _LENGTHS[i])), max(1, round(output * _LENGTHS[j]))) for i, j in enumerate(_PAIRING)
        )
        costs = self.costs.scaled(math.exp(key[3] * _STEP))
        return Engine(costs, LengthSample(1.0, lengths, key[2] / 50).profile, limits, target)


def _steps(value: float) -> int:
    return round(math.log(max(value, 1e-6)) / _STEP)


def _fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares of seconds over sequences: (base, per sequence), neither negative."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(0.0, min(slope, mean_y / mean_x if mean_x else 0.0))
    return max(1e-6, mean_y - slope * mean_x), slope
