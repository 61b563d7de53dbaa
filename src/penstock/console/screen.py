"""The fleet as text: what the page shows, for a terminal of eighty columns or more. Pure: news in, lines out.

It reads what a page reads (`feed`), so it looks the same at a gateway and at a single replica.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct

from penstock.console.history import ALL
from penstock.console.views import QueueRow, ReplicaRow, State, TenantRow

Number = float | None

_BAR = 10  # characters
_MOST_TENANTS, _MOST_ALERTS = 5, 5
_GOOD, _FAIR, _BAD, _DIM, _BOLD, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_COLOURS = {"ready": _GOOD, "degraded": _FAIR, "draining": _FAIR, "starting": _FAIR, "restarting": _FAIR}


class Hello(Struct):
    """What who comes is told first."""

    kind: str
    version: str
    began_s: float
    at_s: float
    columns: list[str]
    series: dict[str, list[list[Number]]]  # by model, columns of seconds
    state: State


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

    def take(self, tick: Tick) -> None:
        self.at_s, self.state, self.rows = tick.at_s, tick.state, tick.rows

    def number(self, model: str, column: str) -> Number:
        row = self.rows.get(model)
        return row[self.hello.columns.index(column)] if row else None


def lines(view: View, *, width: int = 80, has_colour: bool = False) -> list[str]:
    shown = _Lines(max(80, width), has_colour)
    _head(shown, view)
    _alerts(shown, view.alerts, view.at_s)
    _models(shown, view)
    _replicas(shown, view.state.replicas)
    _queues(shown, view.state.queues)
    _tenants(shown, view.state.tenants)
    return shown.lines


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

    @property
    def name_width(self) -> int:
        """Of a first column: what a wide terminal has more is for names."""
        return 18 + (self.width - 80)


def _head(shown: _Lines, view: View) -> None:
    hello = view.hello
    left = f"penstock {hello.kind} {hello.version} at {view.url}"
    right = f"up {_span(view.at_s - hello.began_s)}  {time.strftime('%H:%M:%S', time.localtime(view.at_s))}"
    shown.add(f"{left:<{shown.width - len(right)}}{right}", _BOLD)
    if view.trouble:
        shown.add(view.trouble, _BAD)
    failed, refused = (view.number(ALL, column) or 0.0 for column in ("failed", "refused"))
    ready = sum(one.state == "ready" for one in view.state.replicas)
    shown.add(
        f"{_rate(view.number(ALL, 'ok'))} ok/s, {_rate(refused)} refused, {_rate(failed)} failed   "
        f"tokens/s: {_count(view.number(ALL, 'input_rate'))} in, {_count(view.number(ALL, 'output_rate'))} out   "
        f"{ready}/{len(view.state.replicas)} replicas ready",
        _BAD if failed else "",
    )


def _alerts(shown: _Lines, alerts: Sequence[AlertLine] | None, now_s: float) -> None:
    if alerts is None:
        return
    firing = sorted((one for one in alerts if one.state == "firing"), key=lambda one: one.severity != "page")
    if not firing:
        shown.add("no alerts", _GOOD)
        return
    shown.title(f"ALERTS {len(firing)}")
    for one in firing[:_MOST_ALERTS]:
        since = _span(now_s - one.since) if one.since else ""
        shown.add(f" {one.severity:<7} {since:>6}  {one.summary}", _BAD if one.severity == "page" else _FAIR)
    if len(firing) > _MOST_ALERTS:
        shown.add(f" and {len(firing) - _MOST_ALERTS} more", _DIM)


def _models(shown: _Lines, view: View) -> None:
    wide = shown.name_width
    times = [f"{kind}_{q}" for kind in ("ttft", "tpot") for q in ("p50", "p95")]
    head = " ".join(f"{name.replace('_', ' '):>8}" for name in times).replace("ttft", "TTFT").replace("tpot", "TPOT")
    shown.title(f"{'MODEL':<{wide}}  ok/s  tok/s {head}  wait   run")
    for model in sorted(name for name in view.rows if name != ALL):
        cells = " ".join(f"{_ms(view.number(model, name)):>8}" for name in times)
        shown.add(
            f"{_fit(model, wide)} {_rate(view.number(model, 'ok')):>5} {_count(view.number(model, 'output_rate')):>6} "
            f"{cells} {_count(view.number(model, 'waiting')):>5} {_count(view.number(model, 'running')):>5}"
        )


def _replicas(shown: _Lines, replicas: Sequence[ReplicaRow]) -> None:
    wide = shown.name_width
    shown.title(
        f"{'REPLICA':<{wide}} {'STATE':<10} {'RUN':>9} {'WAIT':>4}  {'KV':<{_BAR + 5}} {'TOK/S':>6} {'HIT':>4} HEARD"
    )
    for one in replicas:
        run = f"{one.running}/{one.max_sequences}" if one.max_sequences else str(one.running)
        state = one.state if one.breaker == "closed" else f"{one.state}*"
        heard = "-" if one.heard_s_ago is None else f"{one.heard_s_ago:.1f}s"
        hit = "-" if one.hit_rate is None else f"{one.hit_rate:.0%}"
        shown.add(
            f"{_fit(one.name, wide)} {state:<10} {run:>9} {one.waiting:>4}  {_bar(one):<{_BAR + 5}} "
            f"{_count(one.tokens_per_s):>6} {hit:>4} {heard:>5}",
            _COLOURS.get(one.state, _BAD) if one.state != "ready" or one.breaker != "closed" else "",
        )
    if any(one.breaker != "closed" for one in replicas):
        shown.add(" * its circuit breaker is open: it gets no work, or a trial", _DIM)
    if not replicas:
        shown.add(" none", _DIM)


def _queues(shown: _Lines, queues: Sequence[QueueRow]) -> None:
    classes = list(dict.fromkeys(name for queue in queues for name in queue.waiting))
    if not classes:
        return
    wide = shown.name_width
    shown.title(f"{'QUEUE':<{wide}} " + " ".join(f"{name:>16}" for name in classes))
    for queue in queues:
        cells = [f"{queue.waiting.get(name, 0):,}/{queue.limits.get(name, 0):,}" for name in classes]
        is_long = any(queue.waiting.values())
        shown.add(f"{_fit(queue.model, wide)} " + " ".join(f"{cell:>16}" for cell in cells), _FAIR if is_long else "")


def _tenants(shown: _Lines, tenants: Sequence[TenantRow]) -> None:
    if not tenants:
        return
    wide = shown.name_width
    shown.title(
        f"{'TENANT':<{wide}} {'REQUESTS':>9} {'REFUSED':>8} {'TOKENS TODAY':>13} {'COST TODAY':>11} {'MONTH':>9}"
    )
    for one in sorted(tenants, key=lambda one: (-one.today_tokens, -one.requests))[:_MOST_TENANTS]:
        shown.add(
            f"{_fit(one.id, wide)} {one.requests:>9,} {one.refused:>8,} {one.today_tokens:>13,} "
            f"{one.today_cost:>11,.4f} {one.month_cost:>9,.2f}"
        )
    if len(tenants) > _MOST_TENANTS:
        shown.add(f" and {len(tenants) - _MOST_TENANTS} more", _DIM)


# -- words


def _bar(replica: ReplicaRow) -> str:
    if not replica.kv_capacity:
        return "-"
    share = min(1.0, replica.kv_used / replica.kv_capacity)
    full = round(share * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {share:>4.0%}"


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
