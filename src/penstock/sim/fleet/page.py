"""The page of `penstock sim fleet --html`: a table, and for each policy replicas by state, demand and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.page.plot import Line, Plot, svg
from penstock.page.style import STYLE
from penstock.sim.fleet.result import FleetResult
from penstock.sim.fleet.table import HEAD, rows


def page(results: Sequence[FleetResult], *, title: str) -> str:
    sections = [
        f"<h2>{escape(result.policy)}</h2><div class=plots>{''.join(svg(plot) for plot in _plots(result))}</div>"
        for result in results
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<main><h1>{escape(title)}, a simulated fleet</h1>{_table(results)}{''.join(sections)}</main></html>\n"
    )


def _plots(result: FleetResult) -> list[Plot]:
    hours = [point.at_s / 3600 for point in result.timeline]
    states = [state for state in ("active", "starting", "standby", "parked") if state in result.hours]
    replicas = [Line(state, hours, [point.states.get(state, 0.0) for point in result.timeline]) for state in states]
    demand = [Line("arrivals", hours, [point.arrivals_per_s for point in result.timeline])]
    for name, field in (("forecast p50", "forecast_p50"), ("forecast p90", "forecast_p90")):
        seen = [(point.at_s / 3600, value) for point in result.timeline if (value := getattr(point, field)) is not None]
        if seen:
            demand.append(Line(name, [at for at, _ in seen], [value for _, value in seen]))
    kept = [Line("in SLO", hours, [100 * point.in_slo for point in result.timeline])]
    return [
        Plot("Replicas by state", "hours", "replicas", replicas),
        Plot("Demand", "hours", "requests/s", demand),
        Plot("Requests within the SLO", "hours", "per cent", kept),
    ]


def _table(results: Sequence[FleetResult]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows(results))
    return f"<div class=scroll><table><tr>{''.join(f'<th>{escape(cell)}' for cell in HEAD)}{cells}</table></div>"
