"""The fleet as a screen of `rich`, for a terminal of eighty columns or more. Pure: a view in, a renderable out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from typing import Generic, NamedTuple, TypeVar

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.api.replica_report import TensorNews
from penstock.console.history import ALL
from penstock.console.top.view import Number, View
from penstock.console.views import QueueRow, ReplicaRow, TenantRow
from penstock.core.ranks import RankFigures
from penstock.core.residency import gib

Row = TypeVar("Row")

_NAME, _BAR = 18, 10  # characters, in eighty columns
_BAR_GROWS = 30  # at most, where there are more
_MAX_TENANTS, _MAX_ALERTS, _MAX_RANKS = 5, 5, 16
_GOOD, _FAIR, _BAD, _DIM, _BOLD = "green", "yellow", "red", "dim", "bold"
_STYLES = {
    "ready": _GOOD,
    "degraded": _FAIR,
    "draining": _FAIR,
    "starting": _FAIR,
    "restarting": _FAIR,
    **dict.fromkeys(("parked", "waking", "standby", "parking", "stopping"), _DIM),  # on purpose
    "out": _DIM,
}


def screen(view: View, width: int) -> RenderableType:
    width = max(80, width)
    parts = (
        *_head(view),
        *_alerts(view),
        *_models(view, width),
        *_shared_models(view, width),
        *_replicas(view.state.replicas, width),
        *_ranks(view.state.replicas, width),
        *_batchers(view.state.replicas, width),
        *_queues(view.state.queues, width),
        *_tenants(view.state.tenants, width),
    )
    return Group(*parts)


def text(view: View, *, width: int) -> str:
    """The screen without colours, for a pipe or a file."""
    file = StringIO()
    console = Console(file=file, width=max(80, width), color_system=None, markup=False, highlight=False, emoji=False)
    console.print(screen(view, width))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


class _Column(NamedTuple, Generic[Row]):
    title: str
    width: int
    cell: Callable[[Row], RenderableType]
    is_left: bool = False
    grows: bool = False  # into what is left over


def _line(said: str, style: str = "") -> Text:
    return Text(said, style, no_wrap=True, overflow="ellipsis")


def _table(
    title: str,
    width: int,
    rows: Sequence[Row],
    name: Callable[[Row], str],
    columns: Sequence[_Column[Row]],
    more: Sequence[_Column[Row]] = (),
    style: Callable[[Row], str] = lambda row: "",
) -> Table:
    """`more` are columns for a wide terminal: as many of them as fit, once names have the room they need."""
    names = [name(row) for row in rows]
    taken = sum(column.width + 1 for column in columns)
    wide = max(_NAME, min(max(map(len, names), default=0), width - taken))
    shown = list(columns)
    for column in more:
        if wide + taken + column.width + 1 <= width:
            shown.append(column)
            taken += column.width + 1
    left = max(0, min(_BAR_GROWS, width - wide - taken))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style=_BOLD)
    table.add_column(title, width=wide, no_wrap=True)
    for column in shown:
        room = column.width + left * column.grows
        table.add_column(column.title, width=room, justify="left" if column.is_left else "right", no_wrap=True)
    for row, called in zip(rows, names, strict=True):
        table.add_row(_fit(called, wide), *(column.cell(row) for column in shown), style=style(row))
    return table


def _head(view: View) -> Iterator[RenderableType]:
    hello = view.hello
    first = Table.grid(expand=True)
    first.add_column(no_wrap=True)
    first.add_column(no_wrap=True, justify="right")
    now = time.strftime("%H:%M:%S", time.localtime(view.at_s))
    first.add_row(
        f"penstock {hello.kind} {hello.version} at {view.url}",
        f"up {_span(view.at_s - hello.began_s)}  {now}",
        style=_BOLD,
    )
    yield first
    if view.trouble:
        yield _line(view.trouble, _BAD)
    failed, refused = (view.rate(ALL, column) or 0.0 for column in ("failed", "refused"))
    healthy = sum(map(_is_healthy, view.state.replicas))
    yield _line(
        f"{_rate(view.rate(ALL, 'ok'))} ok/s, {_rate(refused)} refused, {_rate(failed)} failed   "
        f"tokens/s: {_count(view.rate(ALL, 'input_tokens'))} in, {_count(view.rate(ALL, 'output_tokens'))} out   "
        f"{healthy}/{len(view.state.replicas)} healthy",
        _BAD if failed else "",
    )


def _alerts(view: View) -> Iterator[RenderableType]:
    if view.alerts is None:
        return
    firing = sorted((one for one in view.alerts if one.state == "firing"), key=lambda one: one.severity != "page")
    if not firing:
        yield _line("no alerts", _GOOD if all(map(_is_healthy, view.state.replicas)) else "")
        return
    yield ""
    yield _line(f"ALERTS {len(firing)}", _BOLD)
    for one in firing[:_MAX_ALERTS]:
        since = _span(view.at_s - one.since) if one.since else ""
        yield _line(f" {one.severity:<7} {since:>6}  {one.summary}", _BAD if one.severity == "page" else _FAIR)
    if len(firing) > _MAX_ALERTS:
        yield _line(f" and {len(firing) - _MAX_ALERTS} more", _DIM)


def _models(view: View, width: int) -> Iterator[RenderableType]:
    def rate(title: str, column: str, width: int = 8) -> _Column[str]:
        return _Column(title, width, lambda model: _rate(view.rate(model, column)))

    def tokens(title: str, column: str, width: int = 8) -> _Column[str]:
        return _Column(title, width, lambda model: _count(view.rate(model, column)))

    def time_of(title: str, column: str) -> _Column[str]:
        return _Column(title, 8, lambda model: _ms(view.number(model, column)))

    def number(title: str, column: str) -> _Column[str]:
        return _Column(title, 5, lambda model: _count(view.number(model, column)))

    yield ""
    yield _table(
        "MODEL",
        width,
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


def _shared_models(view: View, width: int) -> Iterator[RenderableType]:
    if view.shared is None:
        return
    yield ""
    for device in view.shared.devices:
        yield _line(f"{device.name}: {gib(device.held_bytes)} of {gib(device.total_bytes)} held by models", _BOLD)
    yield _table(
        "ON THE DEVICE",
        width,
        view.shared.models,
        lambda model: model.name,
        [
            _Column("state", 9, lambda model: model.state, True),
            _Column("pinned", 6, lambda model: "yes" if model.pinned else ""),
            _Column("ready in", 8, lambda model: "" if model.eta_s is None else _span(model.eta_s)),
            _Column("memory", 10, lambda model: gib(model.memory.held_bytes)),
            _Column("KV cache", 10, lambda model: gib(model.memory.kv_bytes)),
            _Column("held", 5, lambda model: f"{model.waiting:,}"),
        ],
        style=lambda model: _FAIR if model.waiting else "" if model.state == "loaded" else _DIM,
    )


def _replicas(replicas: Sequence[ReplicaRow], width: int) -> Iterator[RenderableType]:
    roles: list[_Column[ReplicaRow]] = [_Column(" ROLE", 8, lambda one: f" {one.role}", True)]
    spread: list[_Column[ReplicaRow]] = [_Column(" RANKS", 12, lambda one: f" {one.parallelism}", True)]
    yield ""
    yield _table(
        "REPLICA",
        width,
        replicas,
        lambda one: one.name,
        [
            _Column("STATE", 10, lambda one: one.state if one.breaker == "closed" else f"{one.state}*", True),
            _Column("RUN", 7, lambda one: f"{one.running}/{one.max_sequences}" if one.max_sequences else "-"),
            _Column("WAIT", 4, lambda one: str(one.waiting)),
            _Column("KV", _BAR, _bar, True, grows=True),
            _Column("", 4, lambda one: _percent(_kv(one))),
            _Column("TOK/S", 6, lambda one: _count(one.tokens_per_s)),
            _Column("CACHED", 6, lambda one: _percent(one.hit_rate)),
            _Column("REPORT", 6, lambda one: "-" if one.heard_s_ago is None else f"{one.heard_s_ago:.1f}s"),
        ],
        [
            *(roles if any(one.role != "both" for one in replicas) else []),
            _Column("STEP", 7, lambda one: _ms(one.step_s)),
            *(spread if any(one.parallelism for one in replicas) else []),
            _Column("RESTARTS", 8, lambda one: str(one.restarts)),
            _Column(" ADDRESS", 27, lambda one: f" {_fit(one.id, 26)}", True),
            _Column("MODEL", 18, lambda one: _fit(one.model, 18), True),
            _Column("SOFTWARE", 16, lambda one: _fit(f"{one.kind} {one.version}", 16), True),
        ],
        lambda one: "" if _is_healthy(one) else _BAD if one.state == "ready" else _STYLES.get(one.state, _BAD),
    )
    if any(one.breaker != "closed" for one in replicas):
        yield _line(" * its circuit breaker is open: it gets no work, or a trial", _DIM)
    if not replicas:
        yield _line(" none", _DIM)


def _ranks(replicas: Sequence[ReplicaRow], width: int) -> Iterator[RenderableType]:
    """Ranks of replicas that have several."""
    rows = [(replica, rank) for replica in replicas for rank in replica.ranks]
    if not rows:
        return
    yield ""
    yield _table(
        "RANK",
        width,
        rows[:_MAX_RANKS],
        lambda row: f"{row[0].name} {row[1].rank}",
        [
            _Column("MEMORY", 9, lambda row: f"{row[1].memory_bytes / (1 << 30):.1f} GiB"),
            _Column("MBU", 6, lambda row: _percent(row[1].mbu)),
            _Column("COMM", 6, lambda row: _communication(row[1])),
        ],
        [
            _Column(" NODE", 24, lambda row: f" {_fit(row[1].node or '-', 23)}", True),
            _Column("GPU", 42, lambda row: row[1].device or "-", True),
        ],
    )
    if any(rank.is_estimated for _, rank in rows):
        yield _line(" ~ estimated: collectives counted, each with its time at the start, without waits", _DIM)
    if len(rows) > _MAX_RANKS:
        yield _line(f" and {len(rows) - _MAX_RANKS} more", _DIM)


def _batchers(replicas: Sequence[ReplicaRow], width: int) -> Iterator[RenderableType]:
    """Versions of models that take tensors."""
    rows = [(replica, version) for replica in replicas for version in replica.tensors]
    if not rows:
        return
    yield ""
    yield _table(
        "BATCHER",
        width,
        rows[:_MAX_RANKS],
        lambda row: f"{row[0].name} v{row[1].version}",
        [
            _Column("RUN", 6, lambda row: str(row[1].running)),
            _Column("WAIT", 6, lambda row: str(row[1].waiting)),
            _Column("ROWS", 10, lambda row: _count(row[1].rows)),
            _Column("A BATCH", 12, lambda row: _batch(row[1])),
            _Column("INSTANCES", 10, lambda row: f"{row[1].instances} {row[1].device}"),
        ],
    )
    if len(rows) > _MAX_RANKS:
        yield _line(f" and {len(rows) - _MAX_RANKS} more", _DIM)


def _batch(version: TensorNews) -> str:
    """Rows, in the mean and at most."""
    mean = f"{version.rows / version.batches:.1f}" if version.batches else "-"
    return f"{mean} of {version.max_batch_size}"


def _queues(queues: Sequence[QueueRow], width: int) -> Iterator[RenderableType]:
    def waiting(name: str) -> _Column[QueueRow]:
        return _Column(name, 16, lambda queue: f"{queue.waiting.get(name, 0):,}/{queue.limits.get(name, 0):,}")

    classes = list(dict.fromkeys(name for queue in queues for name in queue.waiting))
    if classes:
        yield ""
        yield _table(
            "QUEUE",
            width,
            queues,
            lambda queue: queue.model,
            [waiting(name) for name in classes],
            style=lambda queue: _FAIR if any(queue.waiting.values()) else "",
        )


def _tenants(tenants: Sequence[TenantRow], width: int) -> Iterator[RenderableType]:
    if not tenants:
        return
    yield ""
    yield _table(
        "TENANT",
        width,
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
        yield _line(f" and {len(tenants) - _MAX_TENANTS} more", _DIM)


def _is_healthy(replica: ReplicaRow) -> bool:
    return replica.state == "ready" and replica.breaker == "closed"


# -- words


def _kv(replica: ReplicaRow) -> float | None:
    """The used share of its KV cache."""
    return min(1.0, replica.kv_used / replica.kv_capacity) if replica.kv_capacity else None


def _bar(replica: ReplicaRow) -> RenderableType:
    share = _kv(replica)
    if share is None:
        return "-"
    return ProgressBar(1.0, share, complete_style=_GOOD if share < 0.8 else _FAIR, finished_style=_BAD)


def _percent(share: Number) -> str:
    return "-" if share is None else f"{share:.0%}"


def _communication(rank: RankFigures) -> str:
    return f"~{_percent(rank.communication)}" if rank.is_estimated else _percent(rank.communication)


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
