"""`penstock sim`: a fleet under a trace, without the fleet. What it knows is in `penstock.sim`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import sim_fleet, sim_rollout
from penstock.cli.replica_counts import replica_counts
from penstock.core.errors import ConfigError
from penstock.core.files import check_outputs, write_file, write_json

if TYPE_CHECKING:
    from penstock.core.request import Priority
    from penstock.core.settings import Role
    from penstock.sim.profile import Profile
    from penstock.sim.result import Result
    from penstock.workload.trace import Arrival

_PROFILE = "h200-llama8b"
_COMPARED = "kv_aware,round_robin,least_connections,session,oracle"


def add_flags(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="sim", required=True, metavar="KIND")
    one = kinds.add_parser("run", help="one policy")
    _add_trace(one, strategy="kv_aware", replicas="16")
    compare = kinds.add_parser("compare", help="policies side by side, at several sizes")
    _add_trace(compare, strategy=_COMPARED, replicas="4,16,64")
    fleet = kinds.add_parser("fleet", help="autoscaling policies over days of demand")
    sim_fleet.add_flags(fleet, _PROFILE)
    rollout = kinds.add_parser("rollout", help="rollouts with a regression planted, or none")
    sim_rollout.add_flags(rollout)
    calibrate = kinds.add_parser("calibrate", help="a profile from the step log of an engine")
    calibrate.add_argument("log", type=Path, metavar="STEPLOG", help="what `penstock engine --step-log FILE` wrote")
    calibrate.add_argument("--like", default=None, metavar="PROFILE", help="the rest of the profile is this one's")
    calibrate.add_argument("--name", default="calibrated", help="of the profile")
    calibrate.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: print it)")
    predict = kinds.add_parser(
        "predict", help="a profile of a model on one GPU or several, by the arithmetic of `plan`"
    )
    _add_predict(predict)


def _add_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as of `penstock plan`: llama70b, hf:org/name, a directory, …")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="of `penstock plan --list-hardware`")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="TOML that adds GPUs, or overrides their figures")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share every layer (default: 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages of a pipeline (default: 1)")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="as --tp: whole experts are shared out")
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs of a node (default: the table's)")
    parser.add_argument("--link", metavar="NAME", help="between GPUs of a node: own or pcie (default: own)")
    parser.add_argument("--network", metavar="NAME", help="between nodes: own, ib400, 100gbe (default: own)")
    parser.add_argument("--quant", metavar="FORMAT", help="bf16, fp8, int8, int4 (default: the model's own)")
    parser.add_argument("--kv", default="bf16", metavar="FORMAT", help="of the KV cache: bf16, fp8 (default: bf16)")
    parser.add_argument("--engine", choices=["vllm", "penstock"], default="penstock", help="(default: penstock)")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--chunk-tokens", type=int, default=8192, metavar="N", help="(default: 8192)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there (default: print it)")


def _add_trace(parser: argparse.ArgumentParser, *, strategy: str, replicas: str) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="of Mooncake's (.jsonl) or Azure's (.csv) form")
    parser.add_argument(
        "--strategy",
        default=strategy,
        metavar="NAME,…",
        help=f"of the router's, or oracle: greedy, by full knowledge of all caches and queues (default: {strategy})",
    )
    parser.add_argument(
        "--replicas",
        default=replicas,
        metavar="N|ROLE=N,…",
        help="fleets; one with roles is prefill=1,decode=3, and a role that was named already begins another fleet "
        f"(default: {replicas})",
    )
    parser.add_argument(
        "--split",
        choices=["auto", "always", "never"],
        default="auto",
        help="whether prompts are computed apart from answers, as models.NAME.split (default: auto)",
    )
    parser.add_argument(
        "--kv-gb-s",
        type=_positive,
        metavar="GB/S",
        help="replicas pull KV blocks from each other, so fast: 400 as NVLink, 50 as 400 Gbit/s of InfiniBand, 12.5 "
        "as 100 GbE (default: 50 for replicas with roles or --split always, else they do not)",
    )
    parser.add_argument(
        "--profile", default=_PROFILE, metavar="NAME|FILE", help=f"what a replica can do (default: {_PROFILE})"
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--speed", type=_positive, metavar="X", help="the trace so many times as fast")
    load.add_argument(
        "--utilisation",
        type=_positive,
        default=0.7,
        metavar="U",
        help="as fast as makes the work, without a hit, this share of the replicas' time (default: 0.7)",
    )
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the trace from this request on")
    parser.add_argument("--count", type=int, default=None, metavar="N", help="so many of it")
    parser.add_argument(
        "--copies", type=int, default=1, metavar="N", help="as many crowds like it, each with its own prompts"
    )
    parser.add_argument("--tenants", type=int, default=1, metavar="N", help="sessions belong to so many (default: 1)")
    parser.add_argument("--classes", default="", metavar="CLASS=SHARE,…", help="interactive=1,standard=8,batch=1")
    parser.add_argument("--ttft", type=_positive, metavar="S", help="the SLO's; default: the profile's")
    parser.add_argument("--tpot", type=_positive, metavar="S", help="likewise")
    parser.add_argument("--weights", default="", metavar="NAME=W,…", help="of the router: prefix=3,load.queue=1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def run(arguments: argparse.Namespace) -> None:
    if arguments.sim == "calibrate":
        _calibrate(arguments)
    elif arguments.sim == "predict":
        _predict(arguments)
    elif arguments.sim == "fleet":
        sim_fleet.run(arguments)
    elif arguments.sim == "rollout":
        sim_rollout.run(arguments)
    else:
        _compare(arguments)


def _compare(given: argparse.Namespace) -> None:
    from penstock.sim.table import markdown, plain
    from penstock.sim.workload import that_fit
    from penstock.workload.trace import read_trace

    check_outputs(given.json, given.html)
    profile = _profile(given.profile)
    slo = replace(profile.slo, ttft_s=given.ttft or profile.slo.ttft_s, tpot_s=given.tpot or profile.slo.tpot_s)
    profile = replace(profile, slo=slo)
    read = read_trace(given.trace, given.first, given.count)
    arrivals = that_fit(read, profile)
    if not arrivals:
        raise ConfigError(f"no request of {given.trace} fits a replica of {profile.name}")
    results = []
    for roles in _fleets(given.replicas):
        for policy in given.strategy.split(","):
            results.append(_run_one(given, profile, arrivals, roles, policy.strip()))
    print((markdown if given.markdown else plain)(results))
    if len(read) > len(arrivals):
        print(f"left out: {len(read) - len(arrivals)} requests that fit no replica", file=sys.stderr)
    if given.json:
        write_json(given.json, results)
    if given.html:
        from penstock.sim.page import page

        write_file(given.html, page(results, slo, title=given.trace.name))


def _run_one(
    given: argparse.Namespace, profile: Profile, arrivals: Sequence[Arrival], roles: tuple[Role, ...], policy: str
) -> Result:
    from penstock.sim.network import KvLink
    from penstock.sim.simulation import POLICIES, Simulation
    from penstock.sim.workload import replay, speed_for
    from penstock.terminal.progress import ProgressBar

    if policy not in POLICIES:
        raise ConfigError(f"no policy '{policy}'; there are {', '.join(POLICIES)}", param="strategy")
    if policy == "oracle" and set(roles) != {"both"}:
        raise ConfigError("the oracle knows no roles: leave it out, or say --replicas N", param="strategy")
    num_replicas = len(roles)
    speed = given.speed or speed_for(arrivals, profile, num_replicas, given.utilisation, given.copies)
    has_transfer = given.kv_gb_s or set(roles) != {"both"} or given.split == "always"
    simulation = Simulation(
        profile,
        roles,
        "oracle" if policy == "oracle" else _routing(policy, given.weights),
        kv_link=KvLink(given.kv_gb_s or KvLink.gb_s) if has_transfer else None,
        split=given.split,
    )
    asks = replay(arrivals, speed, copies=given.copies, tenants=given.tenants, classes=_classes(given.classes))
    total, has_terminal = len(arrivals) * given.copies, sys.stderr.isatty()

    bar, label = ProgressBar(unit="requests"), f"{policy}, {num_replicas} replicas"
    result = simulation.run(asks, progress=(lambda now, count: bar(label, count, total)) if has_terminal else None)
    bar.close()
    print(
        f"{policy}, {num_replicas} replicas: {result.requests:,} requests, the trace {speed:.2f} times as fast, "
        f"{result.seconds:,.0f} s simulated in {result.cpu_s:.1f} s",
        file=sys.stderr,
    )
    return result


def _profile(name: str) -> Profile:
    from penstock.cli.config_file import read_config_file
    from penstock.sim.profile import load_profile

    with read_config_file(path).located() if (path := Path(name)).is_file() else nullcontext():
        return load_profile(name)


def _routing(policy: str, weights: str) -> Any:
    from penstock.core.config import build
    from penstock.router.strategies import RoutingSettings

    values: dict[str, Any] = {}
    for name, number in _pairs(weights, "weights"):
        group = values
        *path, last = name.split(".")
        for part in path:
            group = group.setdefault(part, {})
        group[last] = number
    return build(RoutingSettings, {"strategy": policy, "weights": values})


def _classes(text: str) -> dict[Priority, float] | None:
    from penstock.admission.settings import CLASS_NAMES

    shares = dict(_pairs(text, "classes"))
    unknown = set(shares) - set(CLASS_NAMES)
    if unknown:
        raise ConfigError(f"no class '{sorted(unknown)[0]}'; there are {', '.join(CLASS_NAMES)}", param="classes")
    return {CLASS_NAMES[name]: share for name, share in shares.items()} or None


def _calibrate(given: argparse.Namespace) -> None:
    from penstock.sim.calibrate import calibrate, read_steps

    check_outputs(given.out)
    steps, limits = read_steps(given.log)
    fit = calibrate(steps)
    like = _profile(given.like) if given.like else None
    print(fit.summary(), file=sys.stderr)
    _write(fit.profile(given.name, limits, like), given.out)


def _predict(given: argparse.Namespace) -> None:
    from penstock.cli.plan_inputs import replica_for
    from penstock.sim.predicted import predicted_profile

    check_outputs(given.out)
    _write(predicted_profile(Path(given.model).name, *replica_for(given)), given.out)


def _write(profile: Profile, out: Path | None) -> None:
    from penstock.sim.profile import write_profile

    text = write_profile(profile)
    if out:
        write_file(out, text)
    else:
        print(text, end="")


def _pairs(text: str, param: str) -> list[tuple[str, float]]:
    try:
        return [(name.strip(), float(number)) for name, number in (part.split("=") for part in text.split(",") if part)]
    except ValueError:
        raise ConfigError(f"--{param} is NAME=NUMBER,…, and not '{text}'", param=param) from None


def _fleets(text: str) -> list[tuple[Role, ...]]:
    """The roles of each fleet's replicas: 4,16 are two fleets, and so are 4,prefill=1,decode=3."""
    groups: list[list[str]] = []
    named: set[str] = set()  # roles of the last one
    for part in text.split(","):
        role = part.partition("=")[0].strip() if "=" in part else ""
        if role and named and role not in named:
            groups[-1].append(part)
        else:
            groups.append([part])
            named = set()
        named |= {role} if role else set()
    try:
        counts = [replica_counts(",".join(group)) for group in groups]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--replicas is N or ROLE=N,…: {error}", param="replicas") from None
    if any(count.is_range for count in counts):
        raise ConfigError(f"--replicas is N or ROLE=N,…, and not a range: '{text}'", param="replicas")
    return [count.each_role for count in counts]


def _positive(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number
