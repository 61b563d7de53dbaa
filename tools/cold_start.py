"""Cold start of a replica, executed and forked from a template in turns: until it is ready, and until its first token.

    python -m tools.cold_start --rounds 5 --before ../main/src

`--before` is the source folder of another tree of penstock, whose replicas are executed in the same turns. The model's
files, kernels and packed weights are in the page cache: a first start of each kind is not counted. Processor seconds
are those of both processes until the first token, and hardly depend on who else uses the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
import uvloop

from penstock.cli.replicas import _reserved_ports, _stop, _write_config, template_modules
from penstock.cli.start_report import read_report
from penstock.core.settings import EngineSettings, Settings
from penstock.engine.messages import Ready
from penstock.engine_process.spawn import TEMPLATE_VARIABLE, ChildProcess, TemplateProcess, spawn


class Start(NamedTuple):
    ready_s: float
    token_s: float
    cpu_s: float
    phases_s: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("executed", "forked"))
    parser.add_argument("--before", type=Path, help="the src folder of another tree")
    uvloop.run(measure(parser.parse_args()))


async def measure(arguments: argparse.Namespace) -> None:
    settings = Settings(model=arguments.model, engine=EngineSettings(threads=arguments.threads))
    here = str(Path(__file__).parents[1] / "src")
    kinds = {"executed": here, "forked": here}
    if arguments.only is not None:
        kinds = {arguments.only: here}
    if arguments.before is not None:
        kinds = {"before": str(arguments.before.resolve()), **kinds}
    starts: dict[str, list[Start]] = {kind: [] for kind in kinds}
    os.environ["PYTHONPATH"] = _before_others(here)
    with (
        tempfile.TemporaryDirectory() as directory,
        _reserved_ports(1) as (port,),
        TemplateProcess.start(template_modules(), Path(directory)) as template,
    ):
        config = _write_config(settings, "measured", port, settings.server.role, 1, Path(directory))
        for turn in range(arguments.rounds + 1):
            for kind, source in kinds.items():
                found = await start(config, port, source, template if kind == "forked" else None)
                if turn:
                    starts[kind].append(found)
    show(starts)


async def start(config: Path, port: int, source: str, template: TemplateProcess | None) -> Start:
    began_s = time.monotonic()
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = ["engine", "--config", str(config), "--log-level", "warning", "--report-fd", str(theirs.fileno())]
        process: ChildProcess
        if template is not None:
            process = await spawn("penstock.cli.main", arguments, pass_fds=[theirs.fileno()])
        else:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.cli.main", *arguments),
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": _before_others(source), TEMPLATE_VARIABLE: "off"},
            )
    try:
        report = await read_report(ours)
        assert isinstance(report, Ready), report
        ready_s = time.monotonic() - began_s
        await asyncio.to_thread(first_token, port)
        token_s = time.monotonic() - began_s
        parent = psutil.Process(process.pid if template is None else template.pid)
        both = [parent, *parent.children()] if template is None else parent.children()
        cpu_s = sum(sum(one.cpu_times()[:2]) for one in both)
        return Start(ready_s, token_s, cpu_s, report.info.startup_s)
    finally:
        await _stop(process)


def _before_others(source: str) -> str:
    return os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))


def first_token(port: int) -> None:
    body = {"model": "measured", "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    header = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), header)) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 1


def show(starts: dict[str, list[Start]]) -> None:
    print("| | ready, s: best (median) | first token, s | CPU, s |\n|---|---|---|---|")
    for kind, all_starts in starts.items():
        columns = [f"{min(column):.2f} ({median(column):.2f})" for column in list(zip(*all_starts, strict=True))[:3]]
        print(f"| {kind} | {' | '.join(columns)} |")
    for kind, all_starts in starts.items():
        best = min(all_starts)
        phases = ", ".join(f"{phase} {1000 * spent:.0f}" for phase, spent in best.phases_s.items())
        print(f"\n{kind}: {phases} ms")


if __name__ == "__main__":
    main()
