"""Tests whose error rate holds however often they are looked at, and whenever one stops: confidence sequences.

With probability 1 - alpha the true difference is inside all intervals of a sequence, from the first look to the last.

`MeanDifference`: differences of means, one for each window of time, by the mixture t-test. The effect over its standard
deviation is mixed with a normal distribution and the deviation itself with the right Haar measure, which makes the
likelihood ratio a martingale (Lai 1976; Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian
means with unknown variance", 2023); here in the form of a regression through the origin, for windows of unequal weight.
What moves both versions in the same window cancels. The deviation is the largest of what the requests inside the
windows show, what windows show, batched by ones, twos, fours and so on (batch means), and what their autocorrelation
says (as of a first-order autoregression, which also makes them fewer): noise that goes on from window to window makes
intervals wider, instead of raising false alarms.

`share_difference`: differences of shares, by beta-binomial mixtures (Robbins 1970; Howard, Ramdas, McAuliffe and
Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", 2021). The product of both arms' likelihood
ratios is minimised over the shares that nobody knows, which leaves an e-process for the difference (universal
inference: Wasserman, Ramdas and Balakrishnan 2020). It holds from the first request on, with no error seen or with
nothing else: ten failures of ten say enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, inf, lgamma, log, sqrt

_SCALES = 8  # batches of up to 128 windows
_MIN_BATCHES = 8  # fewer say nothing of a variance
_MIN_WINDOWS = 8  # that are worth as much as independent ones
_PRIORS = ((0.5, 0.5), (0.5, 100.0))  # beta distributions, half of the mixture each: of any share, and of small ones

Arm = tuple[float, int]  # how many did, of how many
Span = tuple[Arm, Arm]  # old and new, while their shares of the traffic stayed as they were


@dataclass(frozen=True)
class Interval:
    estimate: float
    low: float
    high: float


@dataclass
class _Scale:
    """Batches of 2^k windows."""

    batches: int = 0
    squares: float = 0.0  # sum over batches of the squared weighted sum over the weight
    total: float = 0.0
    weight: float = 0.0
    open_total: float = 0.0  # of the first half of the next scale's batch
    open_weight: float = 0.0
    is_half: bool = False


@dataclass
class MeanDifference:
    """Windows' differences, each with its weight: the number of requests that would tell as much by themselves. A
    request's variance over the weight is the window's."""

    prior_weight: float = 30.0  # intervals are narrowest, for what they could be, at about ten times this weight
    pseudo_squares: float = 0.0  # of one request more, that nobody made: values that never differed may do so yet
    windows: int = 0
    total: float = 0.0  # sum of weight times difference
    weight: float = 0.0
    within_squares: float = 0.0  # of requests around their window's mean
    within_freedom: float = 0.0
    scales: list[_Scale] = field(default_factory=lambda: [_Scale() for _ in range(_SCALES)])
    lagged_weight: float = 0.0  # of each window and the one before it
    lagged_total: float = 0.0
    lagged_products: float = 0.0
    _last: tuple[float, float] = (0.0, 0.0)
    _known: tuple[float, Interval | None] | None = None  # the last interval, as long as it holds

    def add(self, difference: float, weight: float, within_squares: float, within_freedom: float) -> None:
        self.windows += 1
        self.total += weight * difference
        self.weight += weight
        self.within_squares += within_squares
        self.within_freedom += within_freedom
        self._known = None
        if self.windows > 1:
            before, before_weight = self._last
            both = sqrt(weight * before_weight)
            self.lagged_weight += both
            self.lagged_total += both * (difference + before)
            self.lagged_products += both * difference * before
        self._last = difference, weight
        total = weight * difference
        for scale in self.scales:  # two batches of one scale are one of the next
            scale.batches += 1
            scale.squares += total * total / weight
            scale.total += total
            scale.weight += weight
            scale.open_total += total
            scale.open_weight += weight
            scale.is_half = not scale.is_half
            if scale.is_half:
                break
            total, weight = scale.open_total, scale.open_weight
            scale.open_total = scale.open_weight = 0.0

    @property
    def estimate(self) -> float | None:
        return self.total / self.weight if self.weight else None

    def interval(self, alpha: float) -> Interval | None:
        """None: nothing can be said yet."""
        if self._known is None or self._known[0] != alpha:
            self._known = alpha, self._interval(alpha)
        return self._known[1]

    def _interval(self, alpha: float) -> Interval | None:
        if self.windows < _MIN_WINDOWS or self.weight <= 0.0:
            return None
        estimate = self.total / self.weight
        lasting = self._autocorrelation(estimate)
        fewer = (1.0 - lasting) / (1.0 + lasting)
        if self.windows * fewer < _MIN_WINDOWS:
            return None
        radius = sqrt(self._variance(estimate, fewer) * self._width(alpha, self.windows * fewer))
        return None if radius == inf else Interval(estimate, estimate - radius, estimate + radius)

    def _autocorrelation(self, estimate: float) -> float:
        """Autocorrelation of successive windows; estimates from few windows are too low by about what is added."""
        around = self._around(self.scales[0], estimate)
        if around <= 0.0:
            return 0.0
        lagged = self.lagged_products - estimate * (self.lagged_total - estimate * self.lagged_weight)
        found = lagged / around
        return min(max(found + (1.0 + 3.0 * max(found, 0.0)) / self.windows, 0.0), 0.95)

    def _variance(self, estimate: float, fewer: float) -> float:
        """Variance of a request's difference: the largest of all that can be had."""
        found = [(self.within_squares + self.pseudo_squares) / max(self.within_freedom + 1.0, 1.0)]
        for scale in self.scales:
            if scale.batches >= _MIN_BATCHES or scale is self.scales[0]:
                found.append(self._around(scale, estimate) / max(scale.batches - 1, 1))
        found.append(found[1] / fewer)
        return max(found)

    @staticmethod
    def _around(scale: _Scale, estimate: float) -> float:
        return max(scale.squares - estimate * (2.0 * scale.total - estimate * scale.weight), 0.0)

    def _width(self, alpha: float, windows: float) -> float:
        """The squared radius, for a variance of 1: where the mixture's likelihood ratio reaches 1 / alpha."""
        weight, prior = self.weight, self.prior_weight
        left = exp(log(alpha * alpha * prior / (weight + prior)) / windows)
        explained = (1.0 - left) * (weight + prior)
        if explained >= weight:
            return inf
        return windows / weight * explained / (weight - explained)


def share_difference(spans: Sequence[Span], alpha: float) -> Interval:
    """The new arm's share minus the old one's. A share may be another one in each span, the difference may not."""
    estimate = share_estimate(spans)
    return Interval(estimate, _edge(spans, -1.0, estimate, alpha), _edge(spans, 1.0, estimate, alpha))


def share_estimate(spans: Sequence[Span]) -> float:
    """The mean of the spans' differences, weighted by what they tell."""
    total = weight = 0.0
    for (old_sum, old_count), (new_sum, new_count) in spans:
        if old_count and new_count:
            here = old_count * new_count / (old_count + new_count)
            total += here * (new_sum / new_count - old_sum / old_count)
            weight += here
    if weight:
        return total / weight
    count = sum(new[1] for _, new in spans)
    return sum(new[0] for _, new in spans) / count if count else 0.0


def is_difference_excluded(spans: Sequence[Span], difference: float, alpha: float) -> bool:
    """Whether it is outside the interval, which costs less than the interval."""
    return evidence_against(spans, difference) >= -log(alpha)


def evidence_against(spans: Sequence[Span], difference: float) -> float:
    """The logarithm of the e-value of a difference: the mixtures' likelihood of both arms over the largest one that is
    possible with it."""
    found = -sum(_best_fit(difference, old, new) for old, new in spans)
    for arm in (0, 1):
        total, count = sum(span[arm][0] for span in spans), sum(span[arm][1] for span in spans)
        found += _log_mixture((total, count))
    return found


def _edge(spans: Sequence[Span], end: float, estimate: float, alpha: float) -> float:
    """The difference between the estimate and the largest or least one possible that is just excluded."""
    threshold = -log(alpha)
    if evidence_against(spans, end) < threshold:
        return end
    inside, outside = estimate, end
    while abs(outside - inside) > 1e-5:
        middle = (inside + outside) / 2
        if evidence_against(spans, middle) < threshold:
            inside = middle
        else:
            outside = middle
    return outside


@lru_cache(maxsize=4096)
def _best_fit(difference: float, old: Arm, new: Arm) -> float:
    """The largest log-likelihood of both arms over all shares of the old one. It is concave: it is largest where its
    slope is 0, which Newton's steps find inside a bracket."""
    low, high = max(0.0, -difference), min(1.0, 1.0 - difference)
    share = (old[0] + 0.5) / (old[1] + 1.0)
    for _ in range(60):
        if high - low < 1e-7 * high + 1e-12:
            break
        if not low < share < high:
            share = (low + high) / 2
        (slope, curvature), (of_new, curvature_of_new) = _slopes(old, share), _slopes(new, share + difference)
        slope, curvature = slope + of_new, curvature + curvature_of_new
        if slope > 0.0:
            low = share
        else:
            high = share
        step = slope / curvature if curvature > 0.0 else 0.0
        if abs(step) < 1e-6 * share:  # it is flat there
            break
        share += step
    share = min(max(share, low), high)
    return _log_likelihood(old, share) + _log_likelihood(new, min(max(share + difference, 0.0), 1.0))


def _slopes(arm: Arm, share: float) -> tuple[float, float]:
    """First and, negative, second derivative of the log-likelihood."""
    total, count = arm
    share = min(max(share, 1e-300), 1.0 - 1e-16)
    good, bad = (count - total) / (1.0 - share), total / share
    return bad - good, good / (1.0 - share) + bad / share


@lru_cache(maxsize=4096)
def _log_mixture(arm: Arm) -> float:
    """Logarithm of the likelihood's mixture."""
    total, count = arm
    parts = [_log_beta(a + total, b + count - total) - _log_beta(a, b) for a, b in _PRIORS]
    most = max(parts)
    return most + log(sum(exp(part - most) for part in parts) / len(parts))


def _log_likelihood(arm: Arm, share: float) -> float:
    total, count = arm
    return _times_log(total, share) + _times_log(count - total, 1.0 - share)


def _times_log(count: float, share: float) -> float:
    if count <= 0.0:
        return 0.0
    return count * log(share) if share > 0.0 else -inf


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
