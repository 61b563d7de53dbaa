"""The last quarter of an hour, second by second, of each model and of all together: what the charts are drawn from.

Pure: it is told what ended and, once a second, how things stand. Rows have counts: a rate is a count divided by the
time between two rows. Quantiles are of the last fifteen seconds, from bins of two percent, so that neither one slow
request nor ten thousand fast ones cost anything to look at.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from math import ceil, exp, log
from typing import NamedTuple

from penstock.gateway.records.facts import Ending, RequestFacts

ALL = ""  # the series of all models together
SECONDS = 900
_WINDOW = 15  # seconds that a quantile is over
_MAX_MODELS = 16  # with series of their own; the others count among all
_BIN = log(1.02)
_LEAST = round(log(1e-6) / _BIN)
_OTHERS = (Ending.REFUSED, Ending.FAILED, Ending.CLIENT_GONE)

COLUMNS = (
    "ok",
    "refused",
    "failed",
    "gone",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_p50",
    "ttft_p95",
    "tpot_p50",
    "tpot_p95",
    "waiting",
    "running",
    "kv",
)

Row = tuple[float | None, ...]  # in the order of COLUMNS
Bins = dict[int, int]  # how many were how long


class Backlog(NamedTuple):
    """The backlog of a model at the end of a second."""

    waiting: int = 0  # at the gateway
    running: int = 0  # requests at replicas
    kv: float | None = None  # share of the KV cache that is held; None: nobody says
    generated: int = 0  # tokens that replicas say they made since the last time


class _Second:
    __slots__ = ("cached", "input", "ok", "others", "output", "tpot", "ttft")

    def __init__(self) -> None:
        self.ok = self.input = self.cached = self.output = 0
        self.others: Counter[str] = Counter()  # that ended in another way
        self.ttft: Bins = {}
        self.tpot: Bins = {}

    def add(self, facts: RequestFacts, counts_output: bool) -> None:
        if facts.ending is Ending.OK:
            self.ok += 1
        else:
            self.others[facts.ending] += 1
        ttft_s, total_s = facts.ttft_s, facts.total_s
        if ttft_s is not None:
            _count(self.ttft, ttft_s)
        if facts.steps:
            return  # its tokens are those of its steps, which are told by themselves
        self.input += facts.input_tokens
        self.cached += facts.cached_tokens
        if counts_output:
            self.output += facts.output_tokens
        if ttft_s is not None and total_s is not None and facts.output_tokens > 1 and facts.ending is Ending.OK:
            _count(self.tpot, (total_s - ttft_s) / (facts.output_tokens - 1))

    def merge(self, other: _Second) -> None:
        self.ok += other.ok
        self.others.update(other.others)
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        _merge(self.ttft, other.ttft)
        _merge(self.tpot, other.tpot)


class _Series:
    def __init__(self, seconds: int) -> None:
        self.columns: list[deque[float | None]] = [deque(maxlen=seconds) for _ in COLUMNS]
        self._recent: deque[_Second] = deque(maxlen=_WINDOW)

    def close(self, second: _Second, backlog: Backlog) -> Row:
        self._recent.append(second)
        ttft: Bins = {}
        tpot: Bins = {}
        for one in self._recent:
            _merge(ttft, one.ttft)
            _merge(tpot, one.tpot)
        row = (
            second.ok,
            *(second.others[ending] for ending in _OTHERS),
            second.input,
            second.cached,
            second.output + backlog.generated,
            *(quantile(bins, q) for bins in (ttft, tpot) for q in (0.5, 0.95)),
            backlog.waiting,
            backlog.running,
            None if backlog.kv is None else round(backlog.kv, 4),
        )
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        return row


class History:
    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self.times: deque[float] = deque(maxlen=seconds)  # since 1970, of the rows; a younger series has the last ones
        self._series: dict[str, _Series] = {ALL: _Series(seconds)}
        self._current: dict[str, _Second] = {}  # by model; of ALL, what is of no model that has a series

    def ended(self, facts: RequestFacts, *, counts_output: bool = True) -> None:
        """`counts_output`: nobody else says how many tokens were made for it."""
        second = self._current.get(facts.model)
        if second is None:
            second = self._current.setdefault(self._name(facts.model), _Second())
        second.add(facts, counts_output)

    def close(self, at_s: float, backlogs: Mapping[str, Backlog]) -> dict[str, Row]:
        """The second is over: its row, by model."""
        self.times.append(round(at_s, 3))
        for model in backlogs:
            self._name(model)
        seconds, self._current = self._current, {}
        together = seconds.setdefault(ALL, _Second())
        for model, second in seconds.items():
            if model != ALL:
                together.merge(second)
        known = {**backlogs, ALL: _sum(backlogs)}
        return {
            model: series.close(seconds.get(model) or _Second(), known.get(model, Backlog()))
            for model, series in self._series.items()
        }

    def columns(self) -> dict[str, list[list[float | None]]]:
        """Returns the columns by model, in the order of COLUMNS."""
        return {model: [list(column) for column in series.columns] for model, series in self._series.items()}

    def _name(self, model: str) -> str:
        """Returns the name of the series that the model counts in."""
        if model not in self._series and len(self._series) <= _MAX_MODELS:
            self._series[model] = _Series(self._seconds)
        return model if model in self._series else ALL


def quantile(bins: Mapping[int, int], share: float) -> float | None:
    left = ceil(share * sum(bins.values()))
    if not left:
        return None
    for place in sorted(bins):
        left -= bins[place]
        if left <= 0:
            break
    return round(exp(place * _BIN), 6)


def _count(bins: Bins, seconds: float) -> None:
    place = round(log(seconds) / _BIN) if seconds > 1e-6 else _LEAST
    bins[place] = bins.get(place, 0) + 1


def _merge(bins: Bins, others: Bins) -> None:
    for place, count in others.items():
        bins[place] = bins.get(place, 0) + count


def _sum(backlogs: Mapping[str, Backlog]) -> Backlog:
    shares = [one.kv for one in backlogs.values() if one.kv is not None]
    return Backlog(
        sum(one.waiting for one in backlogs.values()),
        sum(one.running for one in backlogs.values()),
        sum(shares) / len(shares) if shares else None,
        sum(one.generated for one in backlogs.values()),
    )
