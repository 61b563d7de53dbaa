"""A report as one HTML page: tables and plots, nothing loaded from anywhere, light or dark as the reader is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.bench.charts import plots
from penstock.bench.point import Point
from penstock.bench.saturation import SaturationReport
from penstock.bench.serve import Report
from penstock.bench.serve_text import circumstances, latencies, ms, rates, remarks, verdict, warnings
from penstock.page.plot import svg
from penstock.page.style import STYLE

SHOWN_WARNINGS = 4  # more are folded


def page(report: Report) -> str:
    title = f"{report.model}: {'saturation' if report.kind == 'saturation' else 'load'} report"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(f"{report.url} · {report.endpoint} · {report.workload} · {report.date}")}</p>',
        f'<p class="verdict">{escape(said)}</p>' if (said := verdict(report)) else "",
        _tiles(report),
        _warnings(list(warnings(report))),
        f'<div class="plots">{"".join(svg(plot) for plot in plots(report))}</div>',
        f"<h2>Throughput</h2>{_table(*rates(report))}{_table(*circumstances(report.points))}",
        f"<h2>Latency, ms</h2>{_table(*latencies(report.points))}",
        _notes(list(remarks(report))),
        f"<h2>How it was measured</h2><pre><code>{escape(report.command)}</code></pre>",
        f'<p class="dim">Latencies count from the time at which a request was to be sent. Seed {escape(report.seed)}; '
        f"tokenizer: {escape(report.tokenizer)}; {escape(report.machine)}; "
        f"{escape(', '.join(f'{name} {version}' for name, version in report.versions.items()))}.</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _tiles(report: Report) -> str:
    if not report.points:
        return ""
    best = _shown(report)
    tiles = [("output tokens/s", f"{best.output_tokens_per_s:,.0f}"), ("requests/s", f"{best.requests_per_s:.2f}")]
    if best.ttft:
        tiles.append(("TTFT p50 / p99, ms", f"{ms(best.ttft.p50)} / {ms(best.ttft.p99)}"))
    if best.tpot:
        tiles.append(("TPOT p50 / p99, ms", f"{ms(best.tpot.p50)} / {ms(best.tpot.p99)}"))
    if best.slo_share is not None:
        tiles.append((f"kept {report.slo}", f"{best.slo_share:.1%}"))
    tiles.append(("failed", f"{sum(best.errors.values()):,}"))
    of = f'<p class="dim">At {escape(best.label)}:</p>' if len(report.points) > 1 else ""
    shown = "".join(f"<div class=tile><b>{escape(v)}</b><span>{escape(k)}</span></div>" for k, v in tiles)
    return f'{of}<div class="tiles">{shown}</div>'


def _shown(report: Report) -> Point:
    """The load whose figures come first: the one that was searched for, or that with the most tokens."""
    if isinstance(report, SaturationReport):
        for point in reversed(report.points):
            if point.load == report.slo_load:
                return point
    return max(report.points, key=lambda point: point.output_tokens_per_s)


def _warnings(lines: Sequence[str]) -> str:
    shown = "".join(f"<p>{escape(line)}</p>" for line in lines)
    if len(lines) > SHOWN_WARNINGS:
        shown = f"<details><summary>{len(lines)} reasons to doubt some of these figures</summary>{shown}</details>"
    return f'<div class="warn">{shown}</div>' if lines else ""


def _notes(lines: Sequence[str]) -> str:
    return f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
