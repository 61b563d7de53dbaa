"""`penstock sim rollout`: what a plan's gates find, and what they find where nothing is wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, write_json

if TYPE_CHECKING:
    from penstock.rollout.policy.plan import RolloutPlan


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="YAML, as of `penstock rollout start` (default: the default plan)"
    )
    parser.add_argument(
        "--planted",
        default="all",
        metavar="NAME,…",
        help="what is wrong with the new version: none, tpot+5%%, tpot+10%%, tpot+25%%, ttft+25%%, errors+0.5%%, "
        "errors+50%%, answers10%%, answers20%%, tenant-tpot+25%% (default: all)",
    )
    parser.add_argument("--runs", type=_count, default=20, metavar="N", help="of each (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the first run (default: 0)")
    parser.add_argument("--rate", type=float, default=20.0, metavar="R", help="requests/s of clients (default: 20)")
    parser.add_argument(
        "--sessions", type=_count, default=400, metavar="N", help="that ask at the same time (default: 400)"
    )
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--story", action="store_true", help="print each run's decisions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def run(given: argparse.Namespace) -> None:
    from penstock.sim.rollout.report import HEAD, REGRESSIONS, markdown, rows, simulate, summarise
    from penstock.sim.rollout.traffic import World
    from penstock.terminal.progress import ProgressBar
    from penstock.terminal.tables import print_table

    check_outputs(given.json)
    names = list(REGRESSIONS) if given.planted == "all" else [name.strip() for name in given.planted.split(",")]
    for name in names:
        if name not in REGRESSIONS:
            raise ConfigError(f"nothing to plant named '{name}'; there are {', '.join(REGRESSIONS)}", param="planted")
    bar, total = ProgressBar(unit="rollouts"), len(names) * given.runs
    outcomes = []
    for outcome in simulate(
        [REGRESSIONS[name] for name in names],
        range(given.seed, given.seed + given.runs),
        _plan(given.plan),
        World(requests_per_s=given.rate, sessions=given.sessions),
        jobs=given.jobs,
    ):
        outcomes.append(outcome)
        if sys.stderr.isatty():
            bar("simulated", len(outcomes), total)
        if given.story:
            print(f"{outcome.regression}, seed {outcome.seed}: {outcome.phase}")
            for entry in outcome.story:
                print(f"    {entry.what}: {entry.reason}", flush=True)
    bar.close()
    summaries = summarise(outcomes)
    if given.markdown:
        print(markdown(summaries))
    else:
        print_table(HEAD, rows(summaries))
    for summary in summaries:
        if summary.regression == "none":
            at_most = f"at most {summary.upper_bound:.2%} at 95 % confidence"
            print(f"aborted for nothing: {summary.aborted} of {summary.runs:,}, {at_most}")
    if given.json:
        write_json(given.json, outcomes)


def _plan(path: Path | None) -> RolloutPlan:
    from penstock.cli.config_file import read_config_file
    from penstock.core.slo import Slo
    from penstock.rollout.policy.plan import plan_from

    if path is None:
        return plan_from({}, Slo())
    read: Any = read_config_file(path)
    with read.located():
        return plan_from(read.values, Slo())


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
