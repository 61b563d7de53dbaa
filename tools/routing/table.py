"""Hit rate and time to the first token of a trace, by strategy and number of replicas.

    python -m tools.routing.table TRACE [--first 0] [--count 3000] [--speed 1.0]

`speed` is for 4 replicas; more of them get the trace as many times faster, so that each has as much to do.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tools.routing.simulation import Simulation

from penstock.router.strategies import STRATEGIES, RoutingSettings, StrategyName
from penstock.workload.trace import Arrival, read_trace


class Result(NamedTuple):
    hit_rate: float  # of prompt tokens
    mean_ttft_s: float
    p95_ttft_s: float
    most_over_mean: float  # computed prompt tokens, of the replica that had most
    num_shed: int


def measure(rows: list[Arrival], routing: RoutingSettings, num_replicas: int, speed: float = 1.0) -> Result:
    sim = Simulation(routing, num_replicas)
    last = sim.ask_all(rows, speed * num_replicas / 4)
    sim.run(last + 60.0)
    answered = [job for job in sim.jobs if job.ttft_s is not None]
    times = sorted(job.ttft_s for job in answered if job.ttft_s is not None)
    prompt = sum(job.request.prompt_tokens for job in answered)
    computed = Counter({name: replica.computed for name, replica in sim.replicas.items()})
    return Result(
        sum(job.hit for job in answered) / prompt,
        sum(times) / len(times),
        times[int(0.95 * len(times))],
        max(computed.values()) * num_replicas / sum(computed.values()),
        sum(job.is_shed for job in sim.jobs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--strategy", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    given = parser.parse_args()
    rows = read_trace(given.trace, given.first, given.count)
    print(
        f"{'replicas':>8}  {'strategy':18} {'hits':>6} {'mean TTFT':>10} {'p95 TTFT':>9} {'most/mean':>9} {'shed':>5}"
    )
    for num_replicas in (4, 16):
        for name in given.strategy:
            strategy: StrategyName = name
            result = measure(rows, RoutingSettings(strategy), num_replicas, given.speed)
            print(
                f"{num_replicas:8}  {name:18} {result.hit_rate:6.1%} {result.mean_ttft_s:9.3f}s "
                f"{result.p95_ttft_s:8.3f}s {result.most_over_mean:9.2f} {result.num_shed:5}"
            )


if __name__ == "__main__":
    main()
