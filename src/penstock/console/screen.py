"""The fleet as text: what the page shows, for a terminal of eighty columns or more. Pure: news in, lines out.

It reads what a page reads (`feed`), so it looks the same at a gateway and at a single replica.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct

from penstock.console.history import ALL
from penstock.console.views import QueueRow, ReplicaRow, State, TenantRow

Number = float | None

Row = TypeVar("Row")

_NAME, _BAR = 18, 10  # characters, in eighty columns
_BAR_GROWS = 30  # at most, where there are more
_MAX_TENANTS, _MAX_ALERTS = 5, 5
_GOOD, _FAIR, _BAD, _DIM, _BOLD, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_COLOURS = {"ready": _GOOD, "degraded": _FAIR, "draining": _FAIR, "starting": _FAIR, "restarting": _FAIR, "out": _DIM}


class Hello(Struct):
    """What who comes is told first."""

    kind: str
    version: str
    began_s: float
    at_s: float
    columns: list[str]
    series: dict[str, list[list[Number]]]  # by model, columns of seconds
    state: State
    times: list[float] = []


class Tick(Struct):
    at_s: float
    state: State
    rows: dict[str, list[Number]]  # by model


class AlertLine(Struct):
    """Of the admin API's alerts, what there is room for."""

    alert: str
    severity: str
    state: str
    summary: str
    since: float = 0.0


class View:
    """What is known now."""

    def __init__(self, url: str, hello: Hello) -> None:
        self.url = url
        self.hello = hello
        self.at_s = hello.at_s
        self.state = hello.state
        self.rows = {model: [column[-1] if column else None for column in s] for model, s in hello.series.items()}
        self.alerts: list[AlertLine] | None = None  # None: there is no watch here
        self.trouble = ""
        self._row_at_s = hello.times[-1] if hello.times else hello.at_s
        self._period_s = self._row_at_s - hello.times[-2] if len(hello.times) > 1 else 1.0

    def take(self, tick: Tick) -> None:
        self.at_s, self.state, self.rows = tick.at_s, tick.state, tick.rows
        self._period_s, self._row_at_s = tick.at_s - self._row_at_s, tick.at_s

    def number(self, model: str, column: str) -> Number:
        row = self.rows.get(model)
        return row[self.hello.columns.index(column)] if row else None

    def rate(self, model: str, column: str) -> Number:
        """A count per second."""
        count = self.number(model, column)
        return None if count is None else count / max(self._period_s, 1e-3)


def lines(view: View, *, width: int = 80, has_colour: bool = False) -> list[str]:
    shown = _Lines(max(80, width), has_colour)
    _head(shown, view)
    _alerts(shown, view)
    _models(shown, view)
    _replicas(shown, view.state.replicas)
    _queues(shown, view.state.queues)
    _tenants(shown, view.state.tenants)
    return shown.lines


class _Column(NamedTuple, Generic[Row]):
    title: str
    width: int
    cell: Callable[[Row], str]
    is_left: bool = False
    grows: Callable[[int], Callable[[Row], str]] | None = None  # into what is left over: its cells, with so much more

    def fit(self, text: str) -> str:
        return f"{text:<{self.width}}" if self.is_left else f"{text:>{self.width}}"


class _Lines:
    def __init__(self, width: int, has_colour: bool) -> None:
        self.width = width
        self.lines: list[str] = []
        self._has_colour = has_colour

    def add(self, text: str, colour: str = "") -> None:
        cut = text if len(text) <= self.width else f"{text[: self.width - 1]}…"
        self.lines.append(f"{colour}{cut}{_PLAIN}" if colour and self._has_colour else cut.rstrip())

    def title(self, text: str) -> None:
        self.add("")
        self.add(text, _BOLD)

    def table(
        self,
        title: str,
        rows: Sequence[Row],
        name: Callable[[Row], str],
        columns: Sequence[_Column[Row]],
        more: Sequence[_Column[Row]] = (),
        colour: Callable[[Row], str] = lambda row: "",
    ) -> None:
        """`more` are columns for a wide terminal: as many of them as fit, once names have the room they need."""
        names = [name(row) for row in rows]
        taken = sum(column.width + 1 for column in columns)
        wide = max(_NAME, min(max(map(len, names), default=0), self.width - taken))
        shown = list(columns)
        for column in more:
            if wide + taken + column.width + 1 <= self.width:
                shown.append(column)
                taken += column.width + 1
        left = min(_BAR_GROWS, self.width - wide - taken)
        if left > 0:
            shown = [
                one if one.grows is None else one._replace(width=one.width + left, cell=one.grows(left))
                for one in shown
            ]
        self.title(" ".join([f"{title:<{wide}}", *(column.fit(column.title) for column in shown)]))
        for row, called in zip(rows, names, strict=True):
            cells = (column.fit(column.cell(row)) for column in shown)
            self.add(" ".join([_fit(called, wide), *cells]), colour(row))


def _head(shown: _Lines, view: View) -> None:
    hello = view.hello
    left = f"penstock {hello.kind} {hello.version} at {view.url}"
    right = f"up {_span(view.at_s - hello.began_s)}  {time.strftime('%H:%M:%S', time.localtime(view.at_s))}"
    shown.add(f"{left:<{shown.width - len(right)}}{right}", _BOLD)
    if view.trouble:
        shown.add(view.trouble, _BAD)
    failed, refused = (view.rate(ALL, column) or 0.0 for column in ("failed", "refused"))
    healthy = sum(map(_is_healthy, view.state.replicas))
    shown.add(
        f"{_rate(view.rate(ALL, 'ok'))} ok/s, {_rate(refused)} refused, {_rate(failed)} failed   "
        f"tokens/s: {_count(view.rate(ALL, 'input_tokens'))} in, {_count(view.rate(ALL, 'output_tokens'))} out   "
        f"{healthy}/{len(view.state.replicas)} healthy",
        _BAD if failed else "",
    )


def _alerts(shown: _Lines, view: View) -> None:
    if view.alerts is None:
        return
    firing = sorted((one for one in view.alerts if one.state == "firing"), key=lambda one: one.severity != "page")
    if not firing:
        shown.add("no alerts", _GOOD if all(map(_is_healthy, view.state.replicas)) else "")
        return
    shown.title(f"ALERTS {len(firing)}")
    for one in firing[:_MAX_ALERTS]:
        since = _span(view.at_s - one.since) if one.since else ""
        shown.add(f" {one.severity:<7} {since:>6}  {one.summary}", _BAD if one.severity == "page" else _FAIR)
    if len(firing) > _MAX_ALERTS:
        shown.add(f" and {len(firing) - _MAX_ALERTS} more", _DIM)


def _models(shown: _Lines, view: View) -> None:
    def rate(title: str, column: str, width: int = 8) -> _Column[str]:
        return _Column(title, width, lambda model: _rate(view.rate(model, column)))

    def tokens(title: str, column: str, width: int = 8) -> _Column[str]:
        return _Column(title, width, lambda model: _count(view.rate(model, column)))

    def time_of(title: str, column: str) -> _Column[str]:
        return _Column(title, 8, lambda model: _ms(view.number(model, column)))

    def number(title: str, column: str) -> _Column[str]:
        return _Column(title, 5, lambda model: _count(view.number(model, column)))

    shown.table(
        "MODEL",
        sorted(name for name in view.rows if name != ALL),
        lambda model: model,
        [
            rate("ok/s", "ok", 5),
            tokens("tok/s", "output_tokens", 6),
            time_of("TTFT p50", "ttft_p50"),
            time_of("TTFT p95", "ttft_p95"),
            time_of("TPOT p50", "tpot_p50"),
            time_of("TPOT p95", "tpot_p95"),
            number("wait", "waiting"),
            number("run", "running"),
        ],
        [
            rate("failed/s", "failed"),
            rate("refused/s", "refused", 9),
            tokens("prompt/s", "input_tokens"),
            tokens("cached/s", "cached_tokens"),
            _Column("KV", 5, lambda model: _percent(view.number(model, "kv"))),
        ],
    )


def _replicas(shown: _Lines, replicas: Sequence[ReplicaRow]) -> None:
    def bars(more: int = 0) -> Callable[[ReplicaRow], str]:
        return lambda one: f" {_bar(one, _BAR + more)}"

    shown.table(
        "REPLICA",
        replicas,
        lambda one: one.name,
        [
            _Column("STATE", 10, lambda one: one.state if one.breaker == "closed" else f"{one.state}*", True),
            _Column("RUN", 7, lambda one: f"{one.running}/{one.max_sequences}" if one.max_sequences else "-"),
            _Column("WAIT", 4, lambda one: str(one.waiting)),
            _Column(" KV", _BAR + 6, bars(), True, bars),
            _Column("TOK/S", 6, lambda one: _count(one.tokens_per_s)),
            _Column("CACHED", 6, lambda one: _percent(one.hit_rate)),
            _Column("REPORT", 6, lambda one: "-" if one.heard_s_ago is None else f"{one.heard_s_ago:.1f}s"),
        ],
        [
            _Column("STEP", 7, lambda one: _ms(one.step_s)),
            _Column("RESTARTS", 8, lambda one: str(one.restarts)),
            _Column(" ADDRESS", 27, lambda one: f" {_fit(one.id, 26)}", True),
            _Column("MODEL", 18, lambda one: _fit(one.model, 18), True),
            _Column("SOFTWARE", 16, lambda one: _fit(f"{one.kind} {one.version}", 16), True),
        ],
        lambda one: "" if _is_healthy(one) else _BAD if one.state == "ready" else _COLOURS.get(one.state, _BAD),
    )
    if any(one.breaker != "closed" for one in replicas):
        shown.add(" * its circuit breaker is open: it gets no work, or a trial", _DIM)
    if not replicas:
        shown.add(" none", _DIM)


def _queues(shown: _Lines, queues: Sequence[QueueRow]) -> None:
    def waiting(name: str) -> _Column[QueueRow]:
        return _Column(name, 16, lambda queue: f"{queue.waiting.get(name, 0):,}/{queue.limits.get(name, 0):,}")

    classes = list(dict.fromkeys(name for queue in queues for name in queue.waiting))
    if classes:
        shown.table(
            "QUEUE",
            queues,
            lambda queue: queue.model,
            [waiting(name) for name in classes],
            colour=lambda queue: _FAIR if any(queue.waiting.values()) else "",
        )


def _tenants(shown: _Lines, tenants: Sequence[TenantRow]) -> None:
    if not tenants:
        return
    shown.table(
        "TENANT",
        sorted(tenants, key=lambda one: (-one.today_tokens, -one.requests))[:_MAX_TENANTS],
        lambda one: one.id,
        [
            _Column("REQUESTS", 9, lambda one: f"{one.requests:,}"),
            _Column("REFUSED", 8, lambda one: f"{one.refused:,}"),
            _Column("TOKENS TODAY", 13, lambda one: f"{one.today_tokens:,}"),
            _Column("COST TODAY", 11, lambda one: f"{one.today_cost:,.4f}"),
            _Column("MONTH", 9, lambda one: f"{one.month_cost:,.2f}"),
        ],
        [
            _Column("CACHED", 7, lambda one: _percent(one.cached_tokens / (one.input_tokens or 1))),
            _Column("TOKENS THIS MONTH", 17, lambda one: f"{one.month_tokens:,}"),
            _Column("DEVICE TIME", 11, lambda one: _span(one.month_device_s)),
            _Column(" PRIORITY", 12, lambda one: f" {one.priority}", True),
            _Column("NAME", 24, lambda one: _fit(one.name, 24), True),
        ],
    )
    if len(tenants) > _MAX_TENANTS:
        shown.add(f" and {len(tenants) - _MAX_TENANTS} more", _DIM)


def _is_healthy(replica: ReplicaRow) -> bool:
    return replica.state == "ready" and replica.breaker == "closed"


# -- words


def _bar(replica: ReplicaRow, width: int) -> str:
    if not replica.kv_capacity:
        return "-"
    share = min(1.0, replica.kv_used / replica.kv_capacity)
    full = round(share * width)
    return f"{'█' * full}{'░' * (width - full)} {share:>4.0%}"


def _percent(share: Number) -> str:
    return "-" if share is None else f"{share:.0%}"


def _fit(name: str, width: int) -> str:
    """The end of a name tells more than its beginning."""
    return f"{name:<{width}}" if len(name) <= width else f"…{name[1 - width :]}"


def _rate(value: Number) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else _count(value)


def _count(value: Number) -> str:
    if value is None:
        return "-"
    for size, mark in ((1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e6 if mark == 'M' else 1e3):.1f}{mark}"
    return f"{value:.0f}"


def _ms(seconds: Number) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.1f} s"
        if seconds >= 10
        else f"{1e3 * seconds:.0f} ms"
        if seconds >= 0.01
        else f"{1e3 * seconds:.1f} ms"
    )


def _span(seconds: float) -> str:
    for size, mark in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{mark}"
    return f"{max(0.0, seconds):.0f}s"
