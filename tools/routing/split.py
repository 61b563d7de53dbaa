"""Cases in which it pays to compute prompts apart from answers: four simulated H200s, never split, always, and by gain.

    python -m tools.routing.split [--traces DIRECTORY] [--kv-gb-s 50] [--scale 1] [--load 0.4 0.7] [--tpot 0.025]

Each workload is played at several shares of the devices' time (its work without any cache). Every way has the same
fleets to choose from: four replicas with both roles, and 1:3, 2:2 and 3:1 (prefill to decode). Its fleet is the one
with the most goodput (of equals the shorter p99 of TPOT) on requests that it is not judged by: the judged ones are
other parts of a trace, or other draws. Figures are means over those, and what follows a ± is the standard error of a
mean of ratios, each of the same requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import NamedTuple

from penstock.core.settings import Role
from penstock.core.slo import Slo
from penstock.router.legs import Split
from penstock.sim.network import KvLink
from penstock.sim.profile import load_profile
from penstock.sim.result import Result
from penstock.sim.simulation import Simulation
from penstock.sim.workload import replay, speed_for, that_fit
from penstock.workload.trace import Arrival, read_trace

DEVICES = 4
WAYS: tuple[Split, ...] = ("never", "always", "auto")


class Shape(NamedTuple):
    """Medians of prompt and answer, of a share of the requests."""

    share: float
    prompt: int
    output: int


class Workload(NamedTuple):
    name: str
    ttft_s: float
    count: int  # of requests to judge by, in each part
    shapes: tuple[Shape, ...] = ()
    trace: str = ""


class Fleet(NamedTuple):
    name: str
    roles: tuple[Role, ...]


class Case(NamedTuple):
    workload: Workload
    traces: Path | None
    count: int
    part: int
    load: float
    fleet: Fleet
    way: Split
    kv_gb_s: float
    tpot_s: float
    chunk_tokens: int


WORKLOADS = (
    Workload("Mooncake", 2.0, 500, trace="mooncake_conversation.jsonl"),
    Workload("Azure", 0.5, 1500, trace="azure_conv.csv"),
    Workload("long prompts", 2.0, 500, (Shape(1.0, 8000, 100),)),
    Workload("long answers", 0.5, 500, (Shape(1.0, 300, 600),)),
    Workload("mixed", 2.0, 600, (Shape(0.75, 500, 300), Shape(0.25, 16000, 100))),
)


def ratio(prefill: int, devices: int = DEVICES) -> tuple[Role, ...]:
    prefills: tuple[Role, ...] = ("prefill",) * prefill
    decodes: tuple[Role, ...] = ("decode",) * (devices - prefill)
    return prefills + decodes


FLEETS = (
    Fleet(f"{DEVICES} both", ("both",) * DEVICES),
    *(Fleet(f"{prefill}:{DEVICES - prefill}", ratio(prefill)) for prefill in range(1, DEVICES)),
)


def fleets_of(way: Split) -> Sequence[Fleet]:
    """A prefill replica that computes nothing for others is a device less."""
    return FLEETS[:1] if way == "never" else FLEETS


def drawn(shapes: Sequence[Shape], count: int, seed: int) -> list[Arrival]:
    """Requests that come at random, one a second."""
    rng, at_s, found = Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(1.0)
        shape = rng.choices(shapes, [one.share for one in shapes])[0]
        prompt, output = (max(2, round(rng.lognormvariate(0, 0.5) * most)) for most in (shape.prompt, shape.output))
        found.append(Arrival(at_s, prompt, output))
    return found


@cache
def whole_trace(path: Path) -> Sequence[Arrival]:
    return read_trace(path)


def requests_of(case: Case) -> list[Arrival]:
    """Part 0 is chosen by, the others are judged by."""
    workload = case.workload
    if not workload.trace:
        return drawn(workload.shapes, case.count, 7 + case.part)
    assert case.traces is not None
    first = case.part * workload.count
    found = whole_trace(case.traces / workload.trace)[first : first + case.count]
    return [one._replace(at_s=one.at_s - found[0].at_s) for one in found]


def simulate(case: Case) -> Result:
    slo = Slo(ttft_s=case.workload.ttft_s, tpot_s=case.tpot_s)
    profile = replace(load_profile("h200-llama8b"), slo=slo, chunk_tokens=case.chunk_tokens)
    arrivals = that_fit(requests_of(case), profile)
    speed = speed_for(arrivals, profile, len(case.fleet.roles), case.load)
    sim = Simulation(profile, case.fleet.roles, kv_link=KvLink(case.kv_gb_s), split=case.way)
    return sim.run(replay(arrivals, speed))


def goodness(result: Result) -> tuple[float, float]:
    return round(result.kept_slo, 3), -(result.tpot_s.p99 or 0.0)


def over(ones: Sequence[Result], others: Sequence[Result]) -> str:
    """The goodput of ones over that of others, part by part."""
    ratios = [one.goodput / max(other.goodput, 1e-9) - 1 for one, other in zip(ones, others, strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return f"{mean(ratios):+.1%} ± {error:.1%}"


def row(name: str, load: float, judged: dict[Split, tuple[Fleet, list[Result]]]) -> list[str]:
    cells = [name, f"{load:g}"]
    for fleet, results in judged.values():
        good, kept = mean(one.goodput for one in results) / DEVICES, mean(one.kept_slo for one in results)
        tpot_s = mean(one.tpot_s.p99 or 0.0 for one in results)
        cells += [f"{good:.3f}/s ({kept:.1%})", f"{tpot_s * 1e3:.1f} ms", fleet.name]
    never, always, auto = (results for _, results in judged.values())
    better = max(never, always, key=lambda results: mean(one.goodput for one in results))
    return [*cells, over(always, never), over(auto, better)]


HEAD = [
    *("workload", "load", "never: goodput/device (in SLO)", "TPOT p99", "fleet"),
    *("always: goodput/device (in SLO)", "TPOT p99", "fleet", "auto: goodput/device (in SLO)", "TPOT p99", "fleet"),
    *("always over never", "auto over the better"),
]


def printed(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="directory of Mooncake's and Azure's traces; without it, neither")
    parser.add_argument("--kv-gb-s", type=float, default=50.0)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many requests of each workload")
    parser.add_argument("--parts", type=int, default=3, help="that fleets are judged by")
    parser.add_argument("--load", type=float, nargs="+", default=[0.4, 0.7])
    parser.add_argument("--tpot", type=float, default=0.025, help="of the SLO, in seconds")
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens in a step")
    parser.add_argument("--only", nargs="+", default=[], help="workloads by name")
    parser.add_argument("--all", action="store_true", help="every simulation besides the table")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    printed(HEAD)
    print("|---|" + "--:|" * (len(HEAD) - 1), flush=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        for load in given.load:
            for workload in WORKLOADS:
                if (given.only and workload.name not in given.only) or (workload.trace and given.traces is None):
                    continue
                count = round(workload.count * given.scale)
                workload = workload._replace(count=count)
                rest = (load, given.kv_gb_s, given.tpot, given.chunk)
                judged = compared(pool, workload, given.traces, given.parts, *rest, shows_all=given.all)
                printed(row(workload.name, load, judged))


def compared(
    pool: ProcessPoolExecutor,
    workload: Workload,
    traces: Path | None,
    parts: int,
    load: float,
    kv_gb_s: float,
    tpot_s: float,
    chunk_tokens: int,
    *,
    shows_all: bool,
) -> dict[Split, tuple[Fleet, list[Result]]]:
    """Returns for each way the fleet that is best by part 0, and what it makes of the others."""

    def case(way: Split, fleet: Fleet, part: int, count: int) -> Case:
        return Case(workload, traces, count, part, load, fleet, way, kv_gb_s, tpot_s, chunk_tokens)

    def run(cases: Sequence[Case]) -> Iterator[Result]:
        for one, result in zip(cases, pool.map(simulate, cases), strict=True):
            if shows_all:
                print(f"    part {one.part}, {one.way}, {one.fleet.name}: {figures(result)}", flush=True)
            yield result

    tried = [(way, fleet) for way in WAYS for fleet in fleets_of(way)]
    tests = run([case(way, fleet, 0, workload.count) for way, fleet in tried])
    chosen: dict[Split, tuple[tuple[float, float], Fleet]] = {}
    for (way, fleet), result in zip(tried, tests, strict=True):
        if way not in chosen or goodness(result) > chosen[way][0]:
            chosen[way] = goodness(result), fleet
    numbers = range(1, 1 + parts)
    return {
        way: (fleet, [*run([case(way, fleet, part, workload.count) for part in numbers])])
        for way, (_, fleet) in chosen.items()
    }


def figures(result: Result) -> str:
    ttft, tpot = result.ttft_s, result.tpot_s
    return (
        f"{result.requests} requests, goodput {result.goodput:.3f}/s, in SLO {result.kept_slo:.1%}, TTFT p50 "
        f"{ttft.p50 or 0:.3f} s p99 {ttft.p99 or 0:.3f} s, TPOT p50 {(tpot.p50 or 0) * 1e3:.1f} ms p99 "
        f"{(tpot.p99 or 0) * 1e3:.1f} ms, shed {sum(result.shed.values())}, {result.output_tokens_per_s:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
