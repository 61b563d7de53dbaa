"""Results as a table, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.sim.result import Result
from penstock.terminal.tables import aligned

_COLUMNS: Sequence[tuple[str, Callable[[Result], str]]] = (
    ("replicas", lambda r: _replicas(r)),
    ("policy", lambda r: r.policy),
    ("TTFT p50", lambda r: _seconds(r.ttft_s.p50)),
    ("p95", lambda r: _seconds(r.ttft_s.p95)),
    ("p99", lambda r: _seconds(r.ttft_s.p99)),
    ("TPOT p50", lambda r: _milliseconds(r.tpot_s.p50)),
    ("p95", lambda r: _milliseconds(r.tpot_s.p95)),
    ("goodput", lambda r: f"{r.goodput:.2f}/s"),
    ("in SLO", lambda r: f"{r.kept_slo:.1%}"),
    ("hits", lambda r: f"{r.hit_rate:.1%}"),
    ("busiest", lambda r: f"{r.busiest:.2f}x"),
    ("work", lambda r: f"{r.utilisation:.0%}"),
    ("shed", lambda r: str(sum(r.shed.values()))),
    ("preempted", lambda r: str(r.preemptions)),
    ("device-hours", lambda r: f"{r.device_hours:.2f}"),
)


def table(results: Sequence[Result]) -> list[list[str]]:
    """Cells, the names of the columns first."""
    return [[name for name, _ in _COLUMNS], *([show(result) for _, show in _COLUMNS] for result in results)]


def plain(results: Sequence[Result]) -> str:
    return "\n".join(aligned(table(results), left=(1,)))


def markdown(results: Sequence[Result]) -> str:
    head, *rows = ("| " + " | ".join(row) + " |" for row in table(results))
    rule = "|" + "|".join("---" if i == 1 else "--:" for i in range(len(_COLUMNS))) + "|"
    return "\n".join([head, rule, *rows])


def _replicas(result: Result) -> str:
    return ",".join(f"{role}={count}" for role, count in result.roles.items()) or str(result.num_replicas)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f} s" if value < 10 else f"{value:.1f} s"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value * 1000:.1f} ms"
