"""`penstock fleet what-if`: a pool's recorded demand under other settings, by the simulator."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from penstock.cli.fleet_recorded import RecordedPool, read_recorded
from penstock.cli.store_flags import print_json, show_time
from penstock.core.errors import ConfigError
from penstock.fleet.alternatives import Alternative, device_kind, parse_alternative
from penstock.sim.fleet.compare import POLICIES
from penstock.sim.fleet.demand import DAY_S, from_history
from penstock.sim.fleet.what_if import (
    Outcome,
    WhatIf,
    measured_costs,
    measured_dispersion,
    recorded_outcome,
    simulate,
)
from penstock.terminal.progress import ProgressBar
from penstock.terminal.tables import print_table

_WEEK_S = 7 * DAY_S
_HEAD = (
    "",
    "COST",
    "CHANGE",
    "IN SLO",
    "REPLICA H",
    "ACTIVE",
    "STANDBY",
    "PARKED",
    "OTHER",
    "SPOT",
    "MOST",
    "DECISIONS",
)
_CONFIGURED = "as configured"


def print_what_if(arguments: argparse.Namespace) -> None:
    since = arguments.since if arguments.since is not None else time.time() - _WEEK_S
    recorded = read_recorded(arguments.name, since, store=arguments.store, config=arguments.config)
    baselines = [name.strip() for name in arguments.policy.split(",") if name.strip()]
    if unknown := [name for name in baselines if name not in POLICIES or name == "oracle"]:
        raise ConfigError(f"no policy '{unknown[0]}'; there are static, hpa, keda, planner", param="policy")
    settings, slo = recorded.settings, recorded.slo
    configured = Alternative(_CONFIGURED, settings, slo)
    others = [
        *(parse_alternative(text, settings, slo) for text in arguments.set),
        *(device_kind(text, settings, slo) for text in arguments.device_kind),
    ]
    found = what_if(recorded, [configured, *others], baselines)
    if arguments.json:
        print_json(found)
        return
    print(
        f"{found.pool}: {found.requests:,} requests, {show_time(found.begins_at)} to {show_time(found.ends_at)} UTC; "
        "all but the first line are simulated\n"
    )
    print_table(_HEAD, _rows(found.alternatives))
    print(f"\nNot known: {'; '.join(found.notes)}.")


def what_if(recorded: RecordedPool, alternatives: Sequence[Alternative], baselines: Sequence[str]) -> WhatIf:
    """`alternatives`: the first is the pool as it is configured, which baselines have the settings of."""
    samples, rounds = recorded.samples, recorded.rounds
    curve = from_history(samples, seed=0, dispersion=measured_dispersion(rounds))
    bar = ProgressBar(unit="seconds")
    run = partial(
        simulate,
        curve,
        costs=measured_costs(rounds),
        durations=rounds[-1].observation.durations,
        num_active=samples[0].states.get("active", 0),
    )
    cases = [(each, "ours") for each in alternatives]
    cases += [(alternatives[0]._replace(name=name), name) for name in baselines]
    outcomes = [recorded_outcome(samples[1:], recorded.decisions)]
    for case, policy in cases:
        progress = partial(bar, case.name) if sys.stderr.isatty() else None
        outcomes.append(run(case, policy=policy, progress=progress))
    bar.close()
    requests = int(curve.arrivals.sum())
    return WhatIf(
        recorded.name, samples[0].at, samples[-1].at, requests, outcomes, list(_notes(recorded, alternatives))
    )


def _notes(recorded: RecordedPool, alternatives: Sequence[Alternative]) -> Iterator[str]:
    """Limits of the answer, in one line."""
    yield "when in its minute a request came, and replicas that fail"
    if refused := sum(each.refused for each in recorded.samples):
        yield f"how many of the {refused:,} refused requests were the same one again"
    if any(each.settings.spot.share for each in alternatives):
        yield "spot capacity that is refused or taken away"
    if any(each.speed != 1.0 for each in alternatives):
        yield "start-up times and KV cache of other devices, taken to be the same"
    if recorded.samples[-1].at - recorded.samples[0].at < 2 * DAY_S:
        yield "the time of week, of which less than two days tell nothing"


def _rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    configured = next(each for each in outcomes if each.name == _CONFIGURED)
    has_price = configured.cost > 0
    rows = []
    for each in outcomes:
        value, usual = (each.cost, configured.cost) if has_price else (each.replica_hours, configured.replica_hours)
        warm = {state: each.hours.get(state, 0.0) for state in ("active", "standby", "parked")}
        rows.append(
            [
                each.name,
                f"{each.cost:,.2f}" if each.cost else "-",
                f"{value / usual - 1:+.0%}" if usual and each is not configured else "",
                f"{each.in_slo:.2%}" if each.in_slo is not None else "-",
                f"{each.replica_hours:,.2f}",
                *(f"{hours:,.2f}" for hours in warm.values()),
                f"{sum(each.hours.values()) - sum(warm.values()):,.2f}",
                f"{each.spot_hours:,.2f}" if each.spot_hours else "-",
                str(each.most_active),
                str(each.decisions),
            ]
        )
    return rows
