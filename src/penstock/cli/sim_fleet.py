"""`penstock sim fleet`: autoscaling policies over days of demand, in minutes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, write_file, write_json

if TYPE_CHECKING:
    from penstock.sim.fleet.demand import DemandCurve

_POLICIES = "ours,static,hpa,keda,planner,oracle"


def add_flags(parser: argparse.ArgumentParser, profile: str) -> None:
    parser.add_argument(
        "demand",
        metavar="DEMAND",
        help="a CSV of start_s, requests_per_s, dispersion, input_mean, output_mean; or a curve: two-peaks, "
        "silent-night, launch-day, holiday-week, steady, surge",
    )
    parser.add_argument("--policy", default=_POLICIES, metavar="NAME,…", help=f"(default: {_POLICIES})")
    parser.add_argument("--profile", default=profile, metavar="NAME|FILE", help=f"of a replica (default: {profile})")
    parser.add_argument("--days", type=float, metavar="N", help="so many of the demand (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the arrivals (default: 0)")
    parser.add_argument("--peak", type=float, metavar="R", help="requests/s of the busiest window: scales the demand")
    parser.add_argument(
        "--burst", type=int, default=1, metavar="S", help="seconds of a burst inside a window (default: 1)"
    )
    parser.add_argument("--cold-start", type=float, default=60.0, metavar="S", help="of a replica (default: 60)")
    parser.add_argument("--wake", type=float, default=2.0, metavar="S", help="of a parked replica (default: 2)")
    parser.add_argument("--slo-ttft", type=float, default=1.0, metavar="S", help="(default: 1)")
    parser.add_argument("--slo-tpot", type=float, default=0.05, metavar="S", help="(default: 0.05)")
    parser.add_argument("--target", type=float, default=0.995, metavar="SHARE", help="the oracle's (default: 0.995)")
    parser.add_argument("--min", type=int, default=1, metavar="N", help="replicas at least (default: 1)")
    parser.add_argument("--max", type=int, default=100, metavar="N", help="replicas at most (default: 100)")
    parser.add_argument(
        "--surge", type=float, default=None, metavar="X", help="declared to the policy, and the curve's"
    )
    parser.add_argument("--price", type=float, default=4.0, metavar="P", help="of a device-hour (default: 4)")
    parser.add_argument("--parked-price", type=float, default=0.4, metavar="P", help="likewise, parked (default: 0.4)")
    parser.add_argument("--requests", action="store_true", help="request by request: for hours of a small demand")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def run(given: argparse.Namespace) -> None:
    from penstock.core.slo import Slo
    from penstock.fleet.policy.observation import Durations
    from penstock.fleet.settings import PoolSettings
    from penstock.sim.fleet.compare import Case, compare
    from penstock.sim.fleet.result import Prices
    from penstock.sim.fleet.table import HEAD, markdown, rows
    from penstock.sim.profile import load_profile
    from penstock.terminal.progress import ProgressBar
    from penstock.terminal.tables import print_table

    check_outputs(given.json, given.html)
    slo = Slo(ttft_s=given.slo_ttft, tpot_s=given.slo_tpot)
    profile = replace(load_profile(given.profile), slo=slo)
    price, parked_price = given.price * profile.devices, given.parked_price * profile.devices
    case = Case(
        _demand(given),
        profile,
        slo,
        PoolSettings(
            min=given.min,
            max=given.max,
            surge=given.surge or 1.0,
            price_per_hour=price,
            parked_price_per_hour=parked_price,
        ),
        Durations(start_s=given.cold_start, wake_s=given.wake),
        given.target,
        Prices(price, parked_price),
        given.requests,
    )
    bar = ProgressBar(unit="seconds")
    progress = bar if sys.stderr.isatty() else None
    results = compare(case, [name.strip() for name in given.policy.split(",")], progress=progress)
    bar.close()
    if given.markdown:
        print(markdown(results))
    else:
        print_table(HEAD, rows(results))
    if given.json:
        write_json(given.json, results)
    if given.html:
        from penstock.sim.fleet.page import page

        write_file(given.html, page(results, title=case.curve.name))


def _demand(given: argparse.Namespace) -> DemandCurve:
    from penstock.sim.fleet.curves import CURVES, curve
    from penstock.sim.fleet.demand import DAY_S, read_demand

    if given.demand in CURVES:
        return curve(given.demand, given.seed, peak=given.peak, days=given.days, surge=given.surge or 3.0)
    if not Path(given.demand).is_file():
        raise ConfigError(f"no file '{given.demand}', and no curve: there are {', '.join(CURVES)}", param="demand")
    read = read_demand(Path(given.demand), given.seed, peak=given.peak, burst_s=given.burst)
    return read.first(round(given.days * DAY_S)) if given.days else read
