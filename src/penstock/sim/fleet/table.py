"""Policies under one demand as a table, for a terminal or for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.sim.fleet.result import FleetResult

_COLUMNS: Sequence[tuple[str, Callable[[FleetResult], str]]] = (
    ("policy", lambda r: r.policy),
    ("in SLO", lambda r: f"{r.in_slo:.2%}"),
    ("replica-hours", lambda r: f"{r.replica_hours:,.1f}"),
    ("device-hours", lambda r: f"{r.device_hours:,.1f}"),
    ("x oracle", lambda r: "-" if r.over_oracle is None else f"{r.over_oracle:.2f}"),
    ("parked hours", lambda r: f"{r.parked_hours:,.1f}"),
    ("cost", lambda r: f"{r.cost:,.0f}"),
    ("most", lambda r: str(r.most_active)),
    ("decisions", lambda r: str(r.decisions)),
    ("taken back", lambda r: f"{r.taken_back:.1%}"),
    ("broken s", lambda r: f"{r.broken_s:,}"),
    ("shed", lambda r: f"{r.shed:.2%}"),
)
HEAD: Sequence[str] = [name for name, _ in _COLUMNS]


def rows(results: Sequence[FleetResult]) -> list[list[str]]:
    return [[show(result) for _, show in _COLUMNS] for result in results]


def markdown(results: Sequence[FleetResult]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [HEAD, *rows(results)]]
    return "\n".join([lines[0], "|---|" + "--:|" * (len(HEAD) - 1), *lines[1:]])
