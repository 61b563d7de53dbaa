"""`penstock replay LOG`: what other policies would have done with the requests of a gateway's decision log; and
`penstock replay fleet`: with the rounds of an autoscaled pool."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import replay_fleet
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.router.strategies import RoutingSettings

_EXAMPLES = """\
examples:
  penstock replay ~/.cache/penstock/decisions/gateway-8000.log --policy round_robin
  penstock replay fleet smollm2 --since 1d --set min=2 --set slo.ttft_s=0.3
  penstock replay fleet --policy hpa"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="a gateway's, under PENSTOCK_HOME/decisions; or `fleet`: an autoscaled pool's decisions, from the store",
    )
    replay_fleet.add_flags(parser)
    parser.add_argument(
        "--policy",
        default="all",
        metavar="NAME,…",
        help="strategies of docs/router.md (default: all); fleet: hpa, keda, planner (default: all, or those by --set)",
    )
    parser.add_argument(
        "--weights",
        type=_weights,
        default={},
        metavar="NAME=X,…",
        help="for them: prefix, session, priority, queue, kv_pressure, output; with --policy all, kv_aware with these",
    )
    parser.add_argument(
        "--alone", action="store_true", help="each choice by itself; else what a policy changes, it is shown later"
    )
    parser.add_argument("--model", metavar="NAME", help="the requests of this model alone (default: all)")
    parser.add_argument("--changes", type=int, default=5, metavar="N", help="show the N largest changes (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> None:
    if str(arguments.log) == "fleet":
        replay_fleet.run(arguments)
        return
    from penstock.cli.store_flags import print_json
    from penstock.gateway.records.decisions import read_entries
    from penstock.replay.replay import Replay
    from penstock.replay.report import report
    from penstock.replay.text import lines

    policies = policies_of(arguments.policy, arguments.weights)
    _check(arguments.log)
    replay = Replay(policies, carries=not arguments.alone, model=arguments.model, num_changes=arguments.changes)
    replay.read(read_entries(arguments.log))
    if not replay.num_choices:
        of_model = f" for '{arguments.model}'" if arguments.model else ""
        raise ConfigError(f"{arguments.log} has no choice of a replica{of_model}")
    found = report(replay)
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(lines(found)))


def policies_of(names: str, weights: dict[str, Any]) -> dict[str, RoutingSettings]:
    from penstock.core.config import build, nearest
    from penstock.router.strategies import STRATEGIES, RoutingSettings

    if names == "all":
        found: dict[str, RoutingSettings] = {name: RoutingSettings(name) for name in STRATEGIES}
        if weights:
            found["kv_aware, weighted so"] = build(RoutingSettings, {"weights": weights})
        return found
    wanted = names.split(",")
    for name in wanted:
        if name not in STRATEGIES:
            hint = nearest(name, STRATEGIES)
            suggestion = f"did you mean {hint}?" if hint else f"there are {', '.join(STRATEGIES)}"
            raise ConfigError(f"'{name}' is no strategy: {suggestion}", param="policy")
    return {name: build(RoutingSettings, {"strategy": name, "weights": weights}) for name in wanted}


def _weights(text: str) -> dict[str, Any]:
    """`prefix=2,queue=1` as the config has it: what load is made of is under `load`."""
    from dataclasses import fields

    from penstock.router.load import Load

    of_load = {field.name for field in fields(Load)}
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER") from None
        if not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=NUMBER")
        name = name.strip().removeprefix("load.")
        (found.setdefault("load", {}) if name in of_load else found)[name] = number
    return found


def _check(path: Path) -> None:
    if path.is_file():
        return
    directory = path if path.is_dir() else path.parent
    there = sorted(directory.glob("*.log")) if directory.is_dir() else []
    hint = f"; there are {', '.join(one.name for one in there[:5])}" if there else ""
    raise ConfigError(f"{path} is no decision log{hint}", param="log")
