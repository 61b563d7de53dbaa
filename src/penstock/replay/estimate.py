"""The accuracy of an estimate of the time to a first token: it is held against what was measured.

The router's own estimate, the wait behind others and the prompt by the prefill speed, is right about who is better
rather than about seconds. So the same two parts are also fitted to what was measured, and judged on requests that the
fit has not seen. It knows no log and no policy.
"""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.replay.policy import Parts

_LEAST = 40  # requests to fit three numbers by

Column = NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """The spread of seconds."""

    mean_s: float
    p50_s: float
    p95_s: float


class Fit(msgspec.Struct, frozen=True):
    """seconds = fixed + queue · (behind others) + prefill · (for the prompt)"""

    fixed_s: float = 0.0
    queue: float = 1.0
    prefill: float = 1.0

    def seconds(self, times: Times) -> Column:
        return self.fixed_s + self.queue * times.queue_s + self.prefill * times.prefill_s


class Accuracy(msgspec.Struct, frozen=True):
    """Estimates' accuracy for what was really done. `explained`: of the variance; 0 is as good as the mean of all."""

    estimated: Spread
    mean_error_s: float  # without its sign
    explained: float


class Judgement(msgspec.Struct, frozen=True):
    num_measured: int
    measured: Spread | None = None  # None: no stream in the log had a first token
    mean_alone_error_s: float = 0.0  # of who says the mean of all for each
    router: Accuracy | None = None
    fitted: Accuracy | None = None  # on requests that the fit had not seen; None: too few
    fit: Fit | None = None


class Times:
    """Estimates, a request at a time; columns when they are read."""

    def __init__(self) -> None:
        self._queue, self._prefill = array("d"), array("d")

    def append(self, parts: Parts) -> None:
        self._queue.append(parts.queue_s)
        self._prefill.append(parts.prefill_s)

    @property
    def queue_s(self) -> Column:
        return np.array(self._queue)

    @property
    def prefill_s(self) -> Column:
        return np.array(self._prefill)


def spread(seconds: Column) -> Spread:
    p50, p95 = np.quantile(seconds, (0.5, 0.95))
    return Spread(float(seconds.mean()), float(p50), float(p95))


def judge(times: Times, waited: Column, measured: Column) -> Judgement:
    """`measured`: NaN where nobody looked; `waited`: at the gateway, before a choice, which no estimate is of."""
    seen = ~np.isnan(measured)
    if not seen.any():
        return Judgement(0)
    waited, measured = waited[seen], measured[seen]
    rows = np.stack((np.ones(len(measured)), times.queue_s[seen], times.prefill_s[seen]), axis=1)
    fit, fitted = None, None
    if len(measured) >= _LEAST:
        fit = _fitted(rows, measured - waited)
        unseen, even = np.empty(len(measured)), np.arange(len(measured)) % 2 == 0
        for part in (even, ~even):
            unseen[part] = _apply(_fitted(rows[~part], (measured - waited)[~part]), rows[part])
        fitted = _accuracy(waited + unseen, measured)
    return Judgement(
        len(measured),
        spread(measured),
        float(np.abs(measured - measured.mean()).mean()),
        _accuracy(waited + _apply(Fit(), rows), measured),
        fitted,
        fit,
    )


def _fitted(rows: Column, seconds: Column) -> Fit:
    """Least squares; nothing counts backwards, and what would is left out. Of long prompts each token takes longer,
    which makes the fixed part negative; without one, least squares miss the mean, so the rest is scaled to it."""
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(rows[:, used], seconds, rcond=None)
        if found.min() >= 0 or len(used) == 1:
            mean = float((rows[:, used] @ found).mean())
            found *= seconds.mean() / mean if mean > 0 else 1.0
            weights = dict(zip(used, found.tolist(), strict=True))
            return Fit(*(max(0.0, weights.get(column, 0.0)) for column in range(3)))
        used.pop(int(found.argmin()))


def _apply(fit: Fit, rows: Column) -> Column:
    found: Column = rows @ np.array((fit.fixed_s, fit.queue, fit.prefill))
    return found


def _accuracy(estimated: Column, measured: Column) -> Accuracy:
    variance = float(((measured - measured.mean()) ** 2).sum())
    explained = 1.0 - float(((measured - estimated) ** 2).sum()) / variance if variance else 0.0
    return Accuracy(spread(estimated), float(np.abs(estimated - measured).mean()), explained)
