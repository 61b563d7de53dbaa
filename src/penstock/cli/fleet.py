"""`penstock fleet`: keeps the right number of replicas of every pool, and says why."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.store_flags import moment
from penstock.core.errors import ConfigError

_EXAMPLES = """\
examples:
  penstock fleet --config fleet.yaml            # the controller, and a gateway in front of its replicas
  penstock fleet --config fleet.yaml --driver kubernetes   # its replicas are pods: see docs/kubernetes.md
  penstock fleet --config fleet.yaml --driver ray          # its replicas are actors: see docs/ray.md
  penstock fleet status                         # pools and replicas now
  penstock fleet explain                        # the last decisions, with their numbers
  penstock fleet explain smollm2 --at 10m       # why it had so many replicas ten minutes ago
  penstock fleet cost --since 7d --by tenant    # idle and warm capacity included
  penstock fleet what-if smollm2 --since 7d --set min=2 --set slo.ttft_s=0.3,standby=1 --device-kind h100=2.5,1.8
  penstock fleet drain zone-b --seconds 120     # its replicas go elsewhere, as if the zone were to be lost
  penstock fleet uncordon zone-b                # it may be used again
  penstock fleet down --config fleet.yaml       # stop the gateway and all replicas"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "action",
        nargs="?",
        default="run",
        choices=["run", "status", "explain", "cost", "what-if", "cordon", "drain", "uncordon", "down"],
        help="run: the controller, until a signal ends it; its replicas go on (default: run). cordon: this machine's "
        "fleets start nothing in a zone, or no spot capacity; drain: and replace what is there",
    )
    parser.add_argument("name", nargs="?", help="explain, what-if: a pool. cordon, drain, uncordon: a zone, or 'spot'")
    parser.add_argument(
        "--seconds", type=float, default=120.0, metavar="S", help="drain: until what is there is killed (default: 120)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML: see docs/autoscaling.md")
    parser.add_argument(
        "--driver",
        choices=["local", "kubernetes", "ray"],
        help="run, down: what starts replicas, instead of the file's",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="of the driver's cluster: a kubeconfig's context, or Ray's address"
    )
    parser.add_argument("--store", metavar="URL", help="where replicas, demand and decisions are kept")
    parser.add_argument("--last", type=int, default=20, metavar="N", help="explain: so many decisions (default: 20)")
    parser.add_argument(
        "--at", type=moment, metavar="WHEN", help="explain: what held then: 2026-11-15T12:00 (UTC), or 10m ago"
    )
    parser.add_argument(
        "--since",
        type=moment,
        metavar="WHEN",
        help="explain, cost, what-if: from then on, in the same words; cost in whole hours (default of cost: 24h, of "
        "what-if: 7d)",
    )
    parser.add_argument("--by", default="pool", choices=["pool", "tenant"], help="cost: of each (default: pool)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE,…",
        help="what-if: an alternative, by settings of a pool: min=2,standby=1, slo.ttft_s=0.3, spot.share=0.5; may be "
        "given several times",
    )
    parser.add_argument(
        "--device-kind",
        action="append",
        default=[],
        metavar="NAME=PRICE[,SPEED]",
        help="what-if: an alternative on another device, its price per hour, and how many times as fast it is",
    )
    parser.add_argument(
        "--policy", default="", metavar="NAME,…", help="what-if: also other policies: static, hpa, keda, planner"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def run(arguments: argparse.Namespace) -> None:
    match arguments.action:
        case "status":
            from penstock.cli.fleet_report import print_status

            print_status(arguments)
        case "explain":
            from penstock.cli.fleet_report import print_decisions

            print_decisions(arguments)
        case "cost":
            from penstock.cli.fleet_report import print_cost

            print_cost(arguments)
        case "what-if":
            from penstock.cli.fleet_what_if import print_what_if

            print_what_if(arguments)
        case "cordon" | "drain" | "uncordon":
            _change_cordon(arguments)
        case action:
            if arguments.config is None:
                raise ConfigError("a fleet needs its configuration: --config FILE", param="config")
            from penstock.cli.fleet_process import run_down, run_fleet

            chosen = {"driver": arguments.driver, "address": arguments.address}
            (run_fleet if action == "run" else run_down)(arguments.config, arguments.store, chosen)


def _change_cordon(arguments: argparse.Namespace) -> None:
    from penstock.fleet.drivers.local import cordon, uncordon
    from penstock.hub.home import penstock_home

    name, fleets = arguments.name or "", penstock_home() / "fleet"
    if arguments.action == "uncordon":
        uncordon(fleets, name)
        print(f"{name} may be used again")
        return
    is_drained = arguments.action == "drain"
    drained = cordon(fleets, name, drained_in_s=arguments.seconds if is_drained else None)
    print(f"nothing is started in {name} until `penstock fleet uncordon {name}`")
    for replica in drained:
        print(f"{replica} is taken away in {arguments.seconds:g} s")
