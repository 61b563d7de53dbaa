"""How the versions of a model do, side by side: counts and times of the last day, by the minute.

It is told of every request of theirs once, at its end, and of every copy. Percentiles come from bins of ten percent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from math import ceil, log

from penstock.gateway.records.token_usage import TokenUsage

_MINUTES = 24 * 60
_BIN = log(1.1)

Document = dict[str, object]


class Times:
    __slots__ = ("bins", "count", "total_s")

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.bins[round(log(max(seconds, 1e-6)) / _BIN)] += 1
        self.count += 1
        self.total_s += seconds

    def merge(self, other: Times) -> None:
        self.bins.update(other.bins)
        self.count += other.count
        self.total_s += other.total_s

    def document(self) -> Document:
        if not self.count:
            return {"mean": None, "p95": None}
        left = ceil(0.95 * self.count)
        for place in sorted(self.bins):
            left -= self.bins[place]
            if left <= 0:
                break
        return {"mean": round(self.total_s / self.count, 6), "p95": round(1.1**place, 6)}


class Tally:
    """Outcomes of requests: those of a minute, or of several."""

    __slots__ = ("cached", "input", "minute", "outcomes", "output", "total", "ttft")

    def __init__(self, minute: int = 0) -> None:
        self.minute = minute
        self.outcomes: Counter[str] = Counter()
        self.input = self.cached = self.output = 0
        self.ttft, self.total = Times(), Times()

    def add(self, outcome: str, usage: TokenUsage | None, ttft_s: float | None, total_s: float | None) -> None:
        self.outcomes[outcome] += 1
        if usage is not None:
            self.input += usage.input_tokens
            self.cached += usage.cached_tokens
            self.output += usage.output_tokens
        if ttft_s is not None:
            self.ttft.add(ttft_s)
        if total_s is not None and outcome == "ok":
            self.total.add(total_s)

    def merge(self, other: Tally) -> None:
        self.outcomes.update(other.outcomes)
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.ttft.merge(other.ttft)
        self.total.merge(other.total)

    def document(self) -> Document:
        requests, errors = self.outcomes.total(), self.outcomes["failed"]
        return {
            "requests": requests,
            "errors": errors,
            "error_rate": round(errors / requests, 6) if requests else 0.0,
            "outcomes": dict(self.outcomes),
            "ttft_s": self.ttft.document(),
            "total_s": self.total.document(),
            "tokens": {"input": self.input, "cached": self.cached, "output": self.output},
        }


class Comparison:
    """Comparison of the pools it is given; others are not counted here. Belongs to the event loop's thread."""

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._answers: dict[str, deque[Tally]] = {}
        self._copies: dict[str, deque[Tally]] = {}
        self.use(pools)

    def use(self, pools: Iterable[str]) -> None:
        """Takes the pools that there are now. What is known of those that stay is kept."""
        names = list(pools)
        self._answers = {pool: self._answers.get(pool) or deque(maxlen=_MINUTES) for pool in names}
        self._copies = {pool: self._copies.get(pool) or deque(maxlen=_MINUTES) for pool in names}

    def __contains__(self, pool: str) -> bool:
        return pool in self._answers

    def answered(
        self,
        pool: str,
        at_s: float,
        outcome: str,
        usage: TokenUsage | None,
        ttft_s: float | None,
        total_s: float | None,
    ) -> None:
        if (tallies := self._answers.get(pool)) is not None:
            _now(tallies, at_s).add(outcome, usage, ttft_s, total_s)

    def copied(
        self,
        pool: str,
        at_s: float,
        outcome: str,
        usage: TokenUsage | None,
        ttft_s: float | None,
        total_s: float | None,
    ) -> None:
        if (tallies := self._copies.get(pool)) is not None:
            _now(tallies, at_s).add(outcome, usage, ttft_s, total_s)

    def since(self, pools: Mapping[str, str], since_s: float) -> Document:
        """Counts by version, in whole minutes; `pools` names the pool of each. Copies have a part of their own."""
        found: Document = {}
        for version, pool in pools.items():
            answers, copies = (_sum(all_.get(pool, ()), since_s) for all_ in (self._answers, self._copies))
            found[version] = answers.document() | ({"shadow": copies.document()} if copies.outcomes else {})
        return found


def _now(tallies: deque[Tally], at_s: float) -> Tally:
    minute = int(at_s // 60)
    if not tallies or tallies[-1].minute != minute:
        tallies.append(Tally(minute))
    return tallies[-1]


def _sum(tallies: Iterable[Tally], since_s: float) -> Tally:
    found = Tally()
    for tally in tallies:
        if tally.minute >= since_s // 60:
            found.merge(tally)
    return found
