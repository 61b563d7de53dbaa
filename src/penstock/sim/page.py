"""The page of `penstock sim --html`: a table and plots, all in one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.core.slo import Slo
from penstock.page.plot import Limit, Line, Plot, svg
from penstock.page.style import STYLE
from penstock.sim.result import Result
from penstock.sim.table import table


def page(results: Sequence[Result], slo: Slo, *, title: str) -> str:
    sections = []
    for num_replicas in sorted({result.num_replicas for result in results}):
        group = [result for result in results if result.num_replicas == num_replicas]
        plots = "".join(svg(plot) for plot in _plots(group, slo))
        sections.append(f"<h2>{num_replicas} replicas</h2>{_table(group)}<div class=plots>{plots}</div>")
    objective = f"SLO: TTFT {slo.ttft_s:g} s" + (f", TPOT {slo.tpot_s * 1000:g} ms" if slo.tpot_s else "")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<main><h1>{escape(title)}, simulated</h1><p class=dim>{escape(results[0].profile)} · {escape(objective)}</p>"
        f"{''.join(sections)}</main></html>\n"
    )


def _plots(results: Sequence[Result], slo: Slo) -> list[Plot]:
    return [
        Plot(
            "Time to first token",
            "per cent of requests",
            "seconds",
            [Line(r.policy, [100 * share for _, share in r.ttft_curve], [s for s, _ in r.ttft_curve]) for r in results],
            [Limit("SLO", slo.ttft_s)],
            is_log_y=True,
        ),
        Plot(
            "p95 of TTFT over time",
            "seconds of the simulation",
            "seconds",
            [Line(r.policy, *_over_time(r)) for r in results],
            [Limit("SLO", slo.ttft_s)],
            is_log_y=True,
        ),
        Plot(
            "Work of each replica",
            "replica, the busiest first",
            "times the mean",
            [Line(r.policy, list(range(1, len(r.loads) + 1)), r.loads) for r in results],
        ),
    ]


def _over_time(result: Result) -> tuple[list[float], list[float]]:
    seen = [(second, p95) for second, _, p95 in result.timeline if p95 is not None]
    return [second for second, _ in seen], [p95 for _, p95 in seen]


def _table(results: Sequence[Result]) -> str:
    head, *rows = table(results)
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<div class=scroll><table><tr>{''.join(f'<th>{escape(cell)}' for cell in head)}{cells}</table></div>"
