"""Demand of a pool from gateways' counters: rates over the last seconds, and means of a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from penstock.fleet.policy.observation import Demand
from penstock.tenancy.fleet import PoolDemand

RATE_S = 15.0  # what the policy reacts to
PEAK_S = 5.0
NOISE_S, MIN_STEPS = 60.0, 20  # of the dispersion
MIX_S, MIX_REQUESTS = 300.0, 2000  # the mean request is that of the last so many, or of so many seconds


class _Sums(NamedTuple):
    """Counters of all gateways together, grown since the meter began."""

    at: float
    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    in_slo: int = 0
    out_of_slo: int = 0


class _Step(NamedTuple):
    """Arrivals between two rows of each gateway, and the time between them by the gateways' own clocks: a row that
    comes a round late is no burst."""

    at: float
    arrivals: int
    passed_s: float


class Totals(NamedTuple):
    """Requests that came, were refused, kept their objectives or did not, and tokens, since a meter began."""

    in_slo: int = 0
    out_of_slo: int = 0
    tokens: int = 0
    arrivals: int = 0
    refused: int = 0


_COUNTED = _Sums._fields[1:]


_ZERO = PoolDemand("", "", 0.0)


class DemandMeter:
    """One pool's. A gateway that starts anew has another name, so that counters only ever grow."""

    def __init__(self) -> None:
        self._current: list[PoolDemand] = []
        self._counted: dict[str, PoolDemand] = {}  # by gateway, also of those that have fallen silent
        self._sums: deque[_Sums] = deque()
        self._steps: deque[_Step] = deque()

    def observe(self, rows: Iterable[PoolDemand], now: float) -> None:
        """Rows of all gateways that still write."""
        total = self._sums[-1] if self._sums else _Sums(now)
        counts = {name: getattr(total, name) for name in _COUNTED}
        self._current = list(rows)
        self._add_step(now)
        for row in self._current:
            # Gateways that this meter finds when it begins may have counted for hours; a later one counts from zero.
            before = self._counted.get(row.gateway) or (_ZERO if self._sums else row)
            for name in _COUNTED:
                counts[name] += getattr(row, name) - getattr(before, name)
            self._counted[row.gateway] = row
        self._sums.append(_Sums(now, **counts))
        while len(self._sums) > 2 and self._sums[1].at <= now - MIX_S:
            self._sums.popleft()

    def demand(self, now: float) -> Demand:
        """Demand as gateways see it; the part that replicas report is the controller's to add."""
        rows = self._current
        recent, mix = self._grown(now, RATE_S), self._mix()
        finished = max(1, mix.finished)
        busy = [row for row in rows if row.arrivals]
        return Demand(
            arrivals_per_s=recent.arrivals / recent.at if recent.at else 0.0,
            peak_arrivals_per_s=self._peak(now),
            dispersion=self._dispersion(),
            prompt_tokens=mix.prompt_tokens / finished,
            output_tokens=mix.output_tokens / finished,
            cached_share=mix.cached_tokens / mix.prompt_tokens if mix.prompt_tokens else 0.0,
            waiting=sum(row.waiting for row in rows),
            waiting_tokens=sum(row.waiting_tokens for row in rows),
            held=sum(row.held for row in rows),
            in_flight=sum(row.in_flight for row in rows),
            oldest_wait_s=max((row.oldest_wait_s for row in rows), default=0.0),
            wait_p95_s=max((row.wait_p95_s for row in busy), default=0.0),
            ttft_p95_s=max((row.ttft_p95_s for row in busy), default=0.0),
            tpot_p95_s=max((row.tpot_p95_s for row in busy), default=0.0),
            latency_p99_s=max((row.latency_p99_s for row in busy), default=0.0),
            tokens_per_s=(recent.prompt_tokens + recent.output_tokens) / recent.at if recent.at else 0.0,
        )

    def _add_step(self, now: float) -> None:
        pairs = [(row, self._counted[row.gateway]) for row in self._current if row.gateway in self._counted]
        passed_s = sum(row.at - before.at for row, before in pairs) / max(1, len(pairs))
        if passed_s > 0:
            self._steps.append(_Step(now, sum(row.arrivals - before.arrivals for row, before in pairs), passed_s))
        while self._steps and self._steps[0].at <= now - NOISE_S:
            self._steps.popleft()

    def _dispersion(self) -> float:
        """The busiest step is left out: a burst that does not come again says nothing of the next minutes."""
        steps = sorted(self._steps, key=lambda step: step.arrivals / step.passed_s)[:-1]
        rate = sum(step.arrivals for step in steps) / max(1e-9, sum(step.passed_s for step in steps))
        if len(steps) < MIN_STEPS or not rate:
            return 1.0
        squares = sum((step.arrivals - rate * step.passed_s) ** 2 / step.passed_s for step in steps)
        return squares / (len(steps) - 1) / rate

    def totals(self) -> Totals:
        last = self._sums[-1] if self._sums else _Sums(0.0)
        tokens = last.prompt_tokens + last.output_tokens
        return Totals(last.in_slo, last.out_of_slo, tokens, last.arrivals, last.refused)

    def _grown(self, now: float, seconds: float) -> _Sums:
        """Growth of the counters in the last seconds; `at` is how many seconds that were."""
        if not self._sums:
            return _Sums(0.0)
        last = self._sums[-1]
        return self._since(next(one for one in self._sums if one.at >= now - seconds or one is last))

    def _mix(self) -> _Sums:
        if not self._sums:
            return _Sums(0.0)
        enough = self._sums[-1].finished - MIX_REQUESTS
        return self._since(next((one for one in reversed(self._sums) if one.finished <= enough), self._sums[0]))

    def _since(self, first: _Sums) -> _Sums:
        last = self._sums[-1]
        counts = {name: getattr(last, name) - getattr(first, name) for name in _COUNTED}
        return _Sums(last.at - first.at, **counts)

    def _peak(self, now: float) -> float:
        recent = [one for one in self._sums if one.at >= now - PEAK_S]
        steps = [(b.arrivals - a.arrivals) / (b.at - a.at) for a, b in pairwise(recent) if b.at > a.at]
        return max(steps, default=0.0)
