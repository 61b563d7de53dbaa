"""Every table of benchmarks.md's section on autoscaling policies, as Markdown: `python -m tools.bench_autoscaling`.

Cases run in processes beside each other, the long ones first; what is done is kept in `--cache`, so that a run that was
cut short goes on where it was. The demand of a real service is a file (`--trace`); the others are curves of our own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Durations
from penstock.fleet.settings import PoolSettings
from penstock.sim.fleet.compare import POLICIES, Case, compare
from penstock.sim.fleet.curves import CURVES, curve
from penstock.sim.fleet.demand import DAY_S, DemandCurve, read_demand
from penstock.sim.fleet.result import FleetResult
from penstock.sim.fleet.table import markdown
from penstock.sim.profile import load_profile

TRACE = "trace"
_SLO = Slo(ttft_s=1.0, tpot_s=0.05)


class Run(NamedTuple):
    demand: str
    days: float | None = None  # None: all of it
    seed: int = 0
    cold_start_s: float = 60.0
    burst_s: int = 1
    policies: Sequence[str] = POLICIES

    @property
    def key(self) -> str:
        return f"{self.demand} {self.days or ''} {self.seed} {self.cold_start_s:g} {self.burst_s}"


_OURS = ("ours", "oracle")
WHOLE = [Run(TRACE), Run("holiday-week"), *(Run(name) for name in CURVES if name != "holiday-week")]
_SHORT = {"two-peaks": 2.0, "silent-night": 2.0, "launch-day": 3.0, "steady": 1.0, "surge": None}
SEEDS = [Run(name, days, seed, policies=_OURS) for name, days in _SHORT.items() for seed in (1, 2)]
COLD = [
    Run(name, days, cold_start_s=cold_s, policies=_OURS)
    for name, days in {TRACE: 2.0, **_SHORT}.items()
    for cold_s in (6.0, 90.0)
]
BURSTS = [Run(TRACE, 2.0, burst_s=seconds, policies=_OURS) for seconds in (1, 10, 60)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="CSV of a demand, as for `penstock sim fleet`")
    parser.add_argument("--cache", type=Path, required=True, help="folder for results")
    parser.add_argument("--only", choices=(TRACE, *CURVES), help="one demand alone")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    given.cache.mkdir(parents=True, exist_ok=True)
    runs = [run for run in (*WHOLE, *BURSTS, *SEEDS, *COLD) if given.only in (None, run.demand)]
    with ProcessPoolExecutor(given.jobs) as pool:
        results = list(pool.map(partial(_results, trace=given.trace, cache=given.cache), runs))
    lines = ["| demand | days | seed | cold start | burst | in SLO | x oracle | taken back | broken s |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for run, found in zip(runs, results, strict=True):
        if run in WHOLE:
            print(f"{run.demand}\n\n{markdown(found)}\n")
        lines.append(_line(run, found[0]))
    print("\n".join(lines))


def _line(run: Run, ours: FleetResult) -> str:
    cells = [run.demand, f"{ours.seconds / DAY_S:.3g}", run.seed, f"{run.cold_start_s:g} s", f"{run.burst_s} s"]
    cells += [f"{ours.in_slo:.2%}", f"{ours.over_oracle:.2f}", f"{ours.taken_back:.1%}", f"{ours.broken_s:,}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def _results(run: Run, trace: Path, cache: Path) -> list[FleetResult]:
    kept = cache / f"{run.key.replace(' ', '_')}.json"
    if kept.exists():
        return msgspec.json.decode(kept.read_bytes(), type=list[FleetResult])
    is_surge = run.demand == "surge"
    case = Case(
        _demand(run, trace),
        replace(load_profile("h200-llama8b"), slo=_SLO),
        _SLO,
        PoolSettings(min=1, max=100, surge=3.0 if is_surge else 1.0, price_per_hour=4.0, parked_price_per_hour=0.4),
        Durations(start_s=run.cold_start_s, wake_s=2.0),
    )
    results = compare(case, run.policies)
    kept.write_bytes(msgspec.json.encode(results))
    print(f"{run.key}: {results[0].cpu_s:.0f} s of CPU", file=sys.stderr)
    return results


def _demand(run: Run, trace: Path) -> DemandCurve:
    if run.demand != TRACE:
        return curve(run.demand, run.seed, days=run.days)
    whole = read_demand(trace, run.seed, burst_s=run.burst_s)
    return whole.first(round(run.days * DAY_S)) if run.days else whole


if __name__ == "__main__":
    main()
