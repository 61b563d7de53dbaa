"""Measures gateways side by side and prints a table. The first --gateway is the one that is compared with the others.

    python tools/gateway_bench.py --tools DIR [--rounds 5] [--seconds 5] [--load whole,stream,…] \\
        --gateway 'bare=python -m tests.gateway.http.bare_gateway {port} {ports}' \\
        --gateway 'vllm-router=vllm-router --port {port} --worker-urls {urls} --policy round_robin'

DIR holds fakeup.c and lgen.c. Core 0 is the gateways', core 1 the load's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from penstock.bench.gateway import LOADS, Candidate, Run, compile_tools, markdown, run_rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gateway", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--load", default=",".join(load.name for load in LOADS))
    arguments = parser.parse_args()
    candidates = [Candidate(*one.split("=", 1)) for one in arguments.gateway]
    loads = [load for load in LOADS if load.name in arguments.load.split(",")]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as built:
        compile_tools(arguments.tools, Path(built))
        rounds = run_rounds(Path(built), candidates, loads, num_rounds=arguments.rounds, seconds=arguments.seconds)
        for run in rounds:
            runs.append(run)
            print(
                f"{run.load:9} {run.candidate:12} {run.req_per_cpu_s:8,.0f} req, {run.chunks_per_cpu_s:8,.0f} chunks "
                f"per CPU second, {run.told['rps']:8,.0f} req/s, {run.told['chunks_s']:8,.0f} chunks/s",
                file=sys.stderr,
            )
    print(markdown(runs, candidates, loads))


if __name__ == "__main__":
    main()
