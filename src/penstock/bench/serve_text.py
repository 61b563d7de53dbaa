"""A report as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.bench.point import Point
from penstock.bench.report import table
from penstock.bench.saturation import SaturationReport
from penstock.bench.serve import Report
from penstock.bench.spread import Spread

LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("gap", "gap"), ("end to end", "e2e"))


def as_text(report: Report) -> str:
    parts = [
        f"{report.model} at {report.url}, {report.endpoint}: {report.workload}; seed {report.seed}; "
        f"tokenizer: {report.tokenizer}",
        verdict(report),
        table(*rates(report)),
        table(*circumstances(report.points)),
        table(*latencies(report.points)),
        "\n".join(f"! {line}" for line in warnings(report)),
        "\n".join(f"- {line}" for line in remarks(report)),
    ]
    return "\n\n".join(filter(None, parts))


def verdict(report: Report) -> str:
    """Returns what a search has found, in a sentence or two; empty for a plain load."""
    if not isinstance(report, SaturationReport):
        return ""
    unit = "req/s" if report.by == "rate" else "clients"
    peak = f"It answers {report.peak_requests_per_s:.2f} req/s and {report.peak_output_tokens_per_s:,.0f} tok/s at most"
    saturated = "" if report.saturation_load is None else f", and keeps up until {report.saturation_load:g} {unit}"
    if report.slo_load is None:
        return f"No load that was tried keeps {report.slo} for {report.goal:.0%} of the requests. {peak}{saturated}."
    how = "confirmed by a second try" if report.is_confirmed else "not confirmed"
    kept = f"{report.slo} is kept for {report.goal:.0%} of the requests up to {report.slo_load:g} {unit} ({how})"
    return f"{kept}. {peak}{saturated}."


def rates(report: Report) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows: what was asked for and what came."""
    header = ["load", "requests", "failed", "req/s", "out tok/s", "all tok/s"]
    header += ["goodput", "SLO met"] if report.slo else []
    rows: list[Sequence[str]] = []
    for point in report.points:
        row = [
            point.label,
            f"{point.num_requests:,}",
            f"{sum(point.errors.values()):,}",
            f"{point.requests_per_s:.2f}",
            f"{point.output_tokens_per_s:,.0f}",
            f"{point.total_tokens_per_s:,.0f}",
        ]
        if report.slo:
            share = "" if point.slo_share is None else f"{point.slo_share:.1%}"
            row += [f"{point.goodput_per_s or 0:.2f}", share]
        rows.append(row)
    return header, rows


def circumstances(points: Sequence[Point]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows: how long it took, how much of the prompts was cached, and what the generator itself needed."""
    rows: list[Sequence[str]] = [
        (
            point.label,
            f"{point.wall_s:.1f}",
            f"{point.cached_tokens / point.prompt_tokens:.0%}" if point.prompt_tokens else "",
            f"{point.health.cpu:.0%}",
            _p99(point.health.lag),
            _p99(point.health.send_delay),
        )
        for point in points
    ]
    return ("load", "seconds", "prompt cached", "generator CPU", "lag p99 ms", "sent late p99 ms"), rows


def latencies(points: Sequence[Point]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows, in milliseconds."""
    rows: list[Sequence[str]] = []
    for point in points:
        for name, attribute in LATENCIES:
            spread: Spread | None = getattr(point, attribute)
            if spread is not None:
                rows.append((point.label, name, *map(ms, (spread.mean, spread.p50, spread.p95, spread.p99))))
    return ("load", "ms", "mean", "p50", "p95", "p99"), rows


def warnings(report: Report) -> Iterator[str]:
    """Yields what stands against the figures."""
    for point in report.points:
        for doubt in point.doubts:
            yield f"{point.label}: {doubt}"
        for kind, number in point.errors.items():
            yield f"{point.label}: {number} of {point.num_requests} failed, {kind}: {point.examples[kind]}"


def remarks(report: Report) -> Iterator[str]:
    if report.slo:
        yield f"SLO: {report.slo}"
    yield from report.notes
    for point in report.points:
        for note in point.notes:
            yield f"{point.label}: {note}"


def _p99(spread: Spread | None) -> str:
    return "" if spread is None else ms(spread.p99)


def ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
