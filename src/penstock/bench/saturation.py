"""`penstock bench saturation`: tries loads until the highest that keeps the SLO, and the server's limit, are known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from penstock.bench.board import Board
from penstock.bench.objective import Objective
from penstock.bench.point import Point
from penstock.bench.search import Search, Try, slo_edge, up_edge
from penstock.bench.serve import Asked, Bench, LoadShape, Report, Target, new_report
from penstock.core.errors import ConfigError

ALONE = LoadShape(concurrency=1)
BASELINE_REQUESTS = 4
MIN_REQUESTS = 20  # of a load: fewer say nothing of a tail
LONGEST_S = 120.0
GROWTH = 0.1  # of the arrivals: a backlog that grows faster is a server that does not keep up
NOISE = 3  # requests that a backlog grows by, for no reason
GAIN = 1.05  # that twice the clients must bring, or more of them bring nothing
SETTLE_S = 30.0  # the longest a server may take to forget a load that was too much


@dataclass(frozen=True)
class SaturationReport(Report):
    by: str = "rate"
    goal: float = 0.95
    slo_load: float | None = None  # the highest that keeps the SLO; None: none does
    is_confirmed: bool = False  # by a second try
    saturation_load: float | None = None  # the highest the server keeps up with
    peak_requests_per_s: float = 0.0
    peak_output_tokens_per_s: float = 0.0


async def bench_saturation(
    target: Target,
    asked: Asked,
    *,
    by: str,
    goal: float,
    start: float | None,
    precision: float,
    seconds: float,
    shape: LoadShape,
    objective: Objective,
    seed: str,
    command: str,
    board: Board,
) -> SaturationReport:
    """`shape` says how arrivals come; its numbers are the search's."""
    bench = await Bench.ready(target, asked, board, objective=objective, seed=seed)
    report = new_report("saturation", bench, target, asked, objective=objective, seed=seed, command=command)
    try:
        points, tries = await _search(bench, by, goal, start, precision, seconds, shape)
    finally:
        bench.close()
    points = sorted(points, key=lambda point: point.load)
    slo_load = slo_edge(tries).passed
    best = max(points, key=lambda point: point.output_tokens_per_s)
    return SaturationReport(
        **{name: getattr(report, name) for name in Report.__dataclass_fields__} | {"points": points},
        by=by,
        goal=goal,
        slo_load=slo_load,
        is_confirmed=sum(one.load == slo_load for one in tries) > 1,
        saturation_load=up_edge(tries).passed,
        peak_requests_per_s=best.requests_per_s,
        peak_output_tokens_per_s=best.output_tokens_per_s,
    )


async def _search(
    bench: Bench, by: str, goal: float, start: float | None, precision: float, seconds: float, shape: LoadShape
) -> tuple[list[Point], list[Try]]:
    baseline, _ = await bench.point(ALONE, num_requests=BASELINE_REQUESTS, duration_s=None)
    if baseline.e2e is None or baseline.ttft is None:
        raise ConfigError(f"one client alone gets no answer: {baseline.examples or baseline.errors}")
    start = start or (1 / baseline.e2e.mean if by == "rate" else 1)
    search = Search(start, precision, is_whole=by == "concurrency")
    points: list[Point] = []
    tries: list[Try] = []
    while (load := search.next_load(tries)) is not None:
        loads = [one.load for one in tries] + search.expected_loads(tries)
        windows = [_window_s(load, seconds, is_again=load in loads[:i]) for i, load in enumerate(loads)]
        number, window_s = len(tries), windows[len(tries)]
        bench.board.step, bench.board.after_s = f"step {number + 1} of about {len(loads)}", sum(windows[number + 1 :])
        tried = replace(shape, rate=load) if by == "rate" else LoadShape(concurrency=int(load))
        point, was_interrupted = await bench.point(
            tried, num_requests=None, duration_s=window_s, drain_s=max(5.0, 2 * baseline.e2e.mean)
        )
        if was_interrupted:
            break
        keeps_slo = (point.slo_share or 0.0) >= goal
        tries.append(Try(load, keeps_slo, keeps_up(point) if by == "rate" else gains(point, points)))
        points.append(point)
        await _settle(bench, baseline.ttft.p50)
    if not points:
        raise ConfigError("it was interrupted before anything was measured")
    return points, tries


def _window_s(load: float, seconds: float, *, is_again: bool) -> float:
    return min(max(seconds * (2 if is_again else 1), MIN_REQUESTS / load), LONGEST_S)


def keeps_up(point: Point) -> bool:
    """Whether the backlog has stopped growing: its mean in the last quarter of the window against the second one."""
    if (
        not point.num_requests
        or sum(point.errors.values()) - point.errors.get("abandoned", 0) > GROWTH * point.num_requests
    ):
        return False
    quarter = len(point.in_flight) // 4
    growth = fmean(point.in_flight[-quarter:]) - fmean(point.in_flight[quarter : 2 * quarter])
    return growth <= max(NOISE, GROWTH * point.num_requests / 2)


def gains(point: Point, others: Sequence[Point]) -> bool:
    """Whether these clients bring more than fewer did."""
    fewer = [other.output_tokens_per_s for other in others if other.load < point.load]
    return point.output_tokens_per_s >= GAIN * max(fewer, default=0.0)


async def _settle(bench: Bench, ttft_s: float) -> None:
    """Waits, SETTLE_S at most, until one request alone is answered about as fast as in the beginning."""
    deadline_s = asyncio.get_running_loop().time() + SETTLE_S
    while asyncio.get_running_loop().time() < deadline_s:
        point, was_interrupted = await bench.point(ALONE, num_requests=1, duration_s=None, is_shown=False)
        if was_interrupted or (point.ttft is not None and point.ttft.p50 <= 2 * ttft_s + 0.05):
            return
        await asyncio.sleep(0.5)
