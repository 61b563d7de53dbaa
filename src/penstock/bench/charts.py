"""Plots of a report: curves over loads, or one load over time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.bench.point import Point
from penstock.bench.saturation import SaturationReport
from penstock.bench.serve import Report
from penstock.bench.serve_text import ms
from penstock.bench.spread import Spread
from penstock.page.plot import Limit, Line, Plot

MIN_ANSWERS = 40  # for a rate over time: fewer make a picture of their ends


def plots(report: Report) -> Iterator[Plot]:
    points = report.points
    if len(points) > 1:
        yield from _curves(report)
        if not isinstance(report, SaturationReport):
            yield _distribution("TTFT of all requests", [(one.label, _ttfts(one)) for one in points])
            yield _distribution("End to end of all requests", [(one.label, _e2es(one)) for one in points])
    elif points:
        (point,) = points
        yield _distribution("How many were at least as fast", [("TTFT", _ttfts(point)), ("end to end", _e2es(point))])
        yield _timeline(report, point)
        yield _in_flight(point)
        if point.num_answers >= MIN_ANSWERS:
            yield _throughput(point)


def _curves(report: Report) -> Iterator[Plot]:
    points = list({one.load: one for one in report.points}.values())  # of two tries at a load the second, longer one
    loads = [one.load for one in points]
    is_log = max(loads) > 10 * min(loads) > 0
    x_label = "clients" if points[0].label.startswith("concurrency") else "requests sent per second"
    found = []
    if isinstance(report, SaturationReport):
        named = (("keeps the SLO", report.slo_load), ("saturated", report.saturation_load))
        found = [Limit(name, load, is_upright=True) for name, load in named if load is not None]
    yield Plot(
        "Throughput",
        x_label,
        "output tokens per second",
        [Line("output tokens/s", loads, [one.output_tokens_per_s for one in points], [_told(one) for one in points])],
        found,
        is_log,
    )
    yield Plot("Requests", x_label, "requests per second", list(_request_lines(report, points)), found, is_log)
    for name, attribute in (("TTFT", "ttft"), ("TPOT", "tpot"), ("End to end", "e2e")):
        spreads: list[tuple[float, Spread]] = [
            (one.load, spread) for one in points if (spread := getattr(one, attribute)) is not None
        ]
        if spreads:
            lines = list(_percentile_lines(spreads))
            yield Plot(name, x_label, "ms", lines, [*found, *_slo(report, attribute)], is_log, is_log_y=True)
    if report.slo:
        share = [100 * (one.slo_share or 0.0) for one in points]
        goal = [Limit("goal", 100 * report.goal)] if isinstance(report, SaturationReport) else []
        lines = [Line("kept", loads, share, [_told(point) for point in points])]
        yield Plot("SLO kept", x_label, "% of requests", lines, [*found, *goal], is_log)


def _request_lines(report: Report, points: Sequence[Point]) -> Iterator[Line]:
    loads = [one.load for one in points]
    yield Line("answered", loads, [one.requests_per_s for one in points], [_told(one) for one in points])
    if report.slo:
        yield Line("within the SLO", loads, [one.goodput_per_s or 0.0 for one in points], colour=2)


def _percentile_lines(spreads: Sequence[tuple[float, Spread]]) -> Iterator[Line]:
    loads = [load for load, _ in spreads]
    for colour, name in enumerate(("p50", "p95", "p99")):
        values = [1000 * getattr(spread, name) for _, spread in spreads]
        titles = [f"{load:g}: {name} {value:,.1f} ms" for load, value in zip(loads, values, strict=True)]
        yield Line(name, loads, values, titles, colour=colour)


def _distribution(title: str, samples: Sequence[tuple[str, list[float]]]) -> Plot:
    lines = []
    for name, values in samples:
        ordered = sorted(1000 * value for value in values)[:: max(1, len(values) // 500)]
        if ordered:
            shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
            lines.append(Line(name, [0.0, *ordered], [0.0, *shares]))
    return Plot(title, "ms", "% of requests", lines)


def _timeline(report: Report, point: Point) -> Plot:
    good = [row for row in point.requests if row.ttft_s is not None]
    lines = [Line("TTFT", [row.intended_s for row in good], [1000 * (row.ttft_s or 0) for row in good], is_dots=True)]
    if failed := [row for row in point.requests if row.error is not None]:
        lines.append(Line("failed", [row.intended_s for row in failed], [0.0] * len(failed), is_dots=True, colour=3))
    return Plot("TTFT over time", "s", "ms", lines, list(_slo(report, "ttft")))


def _in_flight(point: Point) -> Plot:
    times = [point.window_s * (index + 1) / len(point.in_flight) for index in range(len(point.in_flight))]
    return Plot("Requests in flight", "s", "requests", [Line("in flight", times, point.in_flight, colour=4)])


def _throughput(point: Point) -> Plot:
    """Tokens of the answers that ended in each part of the time."""
    num_parts = max(1, min(60, point.num_answers // 4))
    part_s = point.wall_s / num_parts
    sums = [0.0] * num_parts
    for row in point.requests:
        sums[min(int(row.ended_s / part_s), num_parts - 1)] += row.output_tokens
    times = [(index + 0.5) * part_s for index in range(num_parts)]
    line = Line("tokens of ended answers", times, [total / part_s for total in sums], colour=2)
    return Plot("Output tokens per second", "s", "tokens/s", [line])


def _slo(report: Report, name: str) -> Iterator[Limit]:
    limit = getattr(report.slo, name, None) if report.slo else None
    if limit is not None:
        yield Limit(f"SLO {1000 * limit:g} ms", 1000 * limit)


def _told(point: Point) -> str:
    ttft = f", TTFT p50 {ms(point.ttft.p50)} ms" if point.ttft else ""
    return f"{point.label}: {point.requests_per_s:.2f} req/s, {point.output_tokens_per_s:,.0f} output tokens/s{ttft}"


def _ttfts(point: Point) -> list[float]:
    return [row.ttft_s for row in point.requests if row.ttft_s is not None]


def _e2es(point: Point) -> list[float]:
    return [row.e2e_s for row in point.requests if row.e2e_s is not None]
