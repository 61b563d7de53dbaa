"""`penstock replay fleet`: the recorded rounds of an autoscaled pool, decided again by other settings or policies."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.store_flags import moment, print_json, show_time
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.fleet_recorded import RecordedPool
    from penstock.fleet.policy.decision import Decision
    from penstock.fleet.rounds import PolicyRound
    from penstock.replay.scaling import Decide, Replayed, ScalingReplay

_BASELINES = ("hpa", "keda", "planner")
_HEAD = ("", "SAME", "MORE", "FEWER", "MEAN WANTED", "MOST")
_WEEK_S = 7 * 86400.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", nargs="?", help="fleet: of this pool (default: the only one)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="fleet: the policy with other settings of the pool: min=2, slo.ttft_s=0.3; may be given several times",
    )
    parser.add_argument(
        "--since", type=moment, metavar="WHEN", help="fleet: 2026-11-15T12:00 (UTC), or a time ago (default: 7d)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="fleet: the fleet's YAML file; its `store` is used")
    parser.add_argument("--store", metavar="URL", help="fleet: where rounds are kept")


def run(arguments: argparse.Namespace) -> None:
    from penstock.cli.fleet_recorded import read_recorded
    from penstock.replay.scaling import replay_rounds
    from penstock.terminal.tables import print_table

    since = arguments.since if arguments.since is not None else time.time() - _WEEK_S
    recorded = read_recorded(arguments.pool, since, store=arguments.store, config=arguments.config)
    policies = {text: _with_settings(text, recorded) for text in arguments.set}
    names = list(_BASELINES) if arguments.policy == "all" else arguments.policy.split(",")
    if arguments.policy != "all" or not policies:
        policies |= {name: _baseline(name, recorded) for name in names}
    found = replay_rounds(recorded.rounds, policies)
    if arguments.json:
        print_json(found)
        return
    print(*_head(found), sep="\n")
    print_table(_HEAD, [_row(each) for each in (found.recorded, *found.policies)])
    for each in found.policies:
        print(*_differences(each, arguments.changes), sep="\n")


def _with_settings(text: str, recorded: RecordedPool) -> Decide:
    from penstock.fleet.alternatives import parse_alternative
    from penstock.replay.scaling import DecideAgain

    other = parse_alternative(text, recorded.settings, recorded.slo)
    if other.speed != 1.0:
        raise ConfigError("`penstock fleet what-if` tells of other devices; a replay has those that there were")
    return DecideAgain(other.settings, other.slo)


def _baseline(name: str, recorded: RecordedPool) -> Decide:
    """It counts replicas and knows no state between on and off, and so only those that are or become active are shown
    to it. What it keeps from round to round is its own."""
    from msgspec.structs import replace

    from penstock.fleet.policy.census import Census
    from penstock.sim.fleet.compare import Case, make_policy
    from penstock.sim.fleet.demand import from_history
    from penstock.sim.fleet.what_if import measured_costs, replica_profile

    if name not in _BASELINES:
        raise ConfigError(f"no policy '{name}' to replay by; there are {', '.join(_BASELINES)}", param="policy")
    profile = replica_profile(measured_costs(recorded.rounds), slo=recorded.slo)
    durations = recorded.rounds[-1].observation.durations
    case = Case(from_history(recorded.samples, seed=0), profile, recorded.slo, recorded.settings, durations)
    policy = make_policy(name, case)

    def decide(each: PolicyRound) -> Decision:
        census = Census(each.observation.replicas)
        shown = replace(each.observation, replicas=(*census.active, *census.coming))
        other = policy.decide(shown, each.decision.at)
        if other.wanted == each.decision.wanted:
            return each.decision
        return replace(other, standby=each.decision.standby, parked=each.decision.parked, reason=f"the rule of {name}")

    return decide


def _head(found: ScalingReplay) -> Iterator[str]:
    yield (
        f"{found.pool}: {found.num_rounds:,} rounds, {found.num_decisions:,} of them decisions, "
        f"{show_time(found.begins_at)} to {show_time(found.ends_at)} UTC"
    )
    if found.num_exact == found.num_rounds:
        yield "the recorded policy decides all of them again exactly as it did\n"
    else:
        others = found.num_rounds - found.num_exact
        yield f"{others:,} of them the recorded policy decides otherwise now: another version of it was recorded\n"


def _row(each: Replayed) -> list[str]:
    shares = [f"{share:.0%}" for share in (each.same, each.more, each.fewer)] if each.name != "recorded" else [""] * 3
    return [each.name, *shares, f"{each.mean_wanted:.2f}", str(each.most_wanted)]


def _differences(found: Replayed, most: int) -> Iterator[str]:
    longest = sorted(found.differences, key=lambda each: each.begins_at - each.ends_at)[:most]
    if not longest:
        return
    of_all = f", the longest {most} of {len(found.differences)} times" if len(found.differences) > most else ""
    yield f"\n{found.name} decides otherwise{of_all}:"
    width = max(len("recorded"), len(found.name))
    for each in sorted(longest, key=lambda one: one.begins_at):
        yield f"{_clock(each.begins_at)}, for {max(1.0, each.ends_at - each.begins_at):.0f} s"
        yield f"    {'recorded':<{width}}  {_in_words(each.recorded)}"
        yield f"    {found.name:<{width}}  {_in_words(each.other)}"


def _in_words(decision: Decision) -> str:
    counts = {"active": decision.wanted, "standby": decision.standby, "parked": decision.parked}
    wanted = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "none"
    kinds = Counter(str(each.kind) for each in decision.actions)
    done = f"; {', '.join(f'{kind} {count}' for kind, count in kinds.items())}" if kinds else ""
    return f"{wanted}: {decision.reason or 'no reason to change it yet'}{done}"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
