"""`penstock bench gateway`: our gateway and others, one at a time on a core, in front of a very fast fake upstream."""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from penstock.core.files import check_outputs, write_file


def add_bench_gateway(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peer",
        dest="peers",
        action="append",
        default=[],
        type=_named_command,
        metavar="NAME=COMMAND",
        help="another gateway; in its command {port} is where it listens, {ports} and {urls} are the upstreams",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="the medians of N are shown (default: 5)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (default: 5)")
    parser.add_argument("--load", metavar="NAME,…", help="some of whole, stream, rate100, open2000 (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into this Markdown")


def bench_gateway(arguments: argparse.Namespace) -> None:
    from penstock.bench.gateway import LOADS, compile_tools, markdown, run_rounds
    from penstock.bench.machine import cpu_name
    from penstock.bench.own_gateway import own_gateway
    from penstock.bench.report import replace_section

    check_outputs(arguments.write)
    if arguments.write:
        replace_section(arguments.write.read_text(), "gateway", "")  # what is wrong with it is told before the run
    names = arguments.load.split(",") if arguments.load else [load.name for load in LOADS]
    loads = [load for load in LOADS if load.name in names]
    runs = []
    with tempfile.TemporaryDirectory() as directory:
        compile_tools(Path(directory))
        candidates = [own_gateway(Path(directory)), *arguments.peers]
        rounds = run_rounds(Path(directory), candidates, loads, num_rounds=arguments.rounds, seconds=arguments.seconds)
        for run in rounds:
            runs.append(run)
            print(
                f"{run.load:9} {run.candidate:14} {run.told['rps']:8,.0f} req/s {run.told['chunks_s']:8,.0f} chunks/s; "
                f"per CPU second {run.req_per_cpu_s:,.0f} and {run.chunks_per_cpu_s:,.0f}",
                file=sys.stderr,
            )
    text = "\n\n".join(
        (
            f"    penstock {shlex.join(sys.argv[1:])}",
            f"{datetime.now(UTC):%Y-%m-%d} · {cpu_name()} · Python {platform.python_version()} · "
            f"medians of {arguments.rounds} round(s) of {arguments.seconds:g} s",
            markdown(runs, candidates, loads),
        )
    )
    print(f"\n{text}")
    if arguments.write:
        write_file(arguments.write, replace_section(arguments.write.read_text(), "gateway", text))


def _named_command(text: str) -> object:
    from penstock.bench.gateway import Candidate

    name, equals, command = text.partition("=")
    if not (name and equals and command):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COMMAND")
    return Candidate(name, command)
