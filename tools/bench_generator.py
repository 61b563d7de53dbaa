"""Is the load generator to be trusted? Two answers, both measured.

    python tools/bench_generator.py capacity
        500 streams from a fake upstream in C on core 0, the generator alone on core 1. The upstream
        writes the time into every chunk, so what the generator's stamps are late by is known chunk by chunk.

    python tools/bench_generator.py agreement --aiperf BIN --tokenizer DIR [--url URL --model NAME]
        The same requests from `penstock bench serve` and from aiperf, in turns, against one server; without --url
        against the fake upstream. `pip install aiperf==0.13.0`, in an environment of its own; DIR is
        what `penstock convert MODEL DIR` writes: aiperf wants one, though it is told to believe the server's counts.

Linux only. Each prints the table that stands in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from penstock.bench.board import Board
from penstock.bench.client import Client, Recording
from penstock.bench.gateway import compile_tools
from penstock.bench.load import Load
from penstock.bench.point import Point, make_point
from penstock.bench.report import table
from penstock.bench.serve_text import ms
from penstock.bench.speech import Speech
from penstock.bench.spread import Spread
from penstock.bench.workloads import Prompts
from penstock.workload.words import COMMON, text

SERVER_CORE, LOAD_CORE = 0, 1
STAMP = re.compile(rb'"@(\d{19})"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    capacity = kinds.add_parser("capacity")
    capacity.add_argument("--streams", type=int, default=500)
    capacity.add_argument("--gap-ms", type=int, default=80, help="between the chunks of a stream")
    capacity.add_argument("--rounds", type=int, default=3)
    agreement = kinds.add_parser("agreement")
    agreement.add_argument("--aiperf", required=True, metavar="BIN")
    agreement.add_argument("--tokenizer", required=True, metavar="DIR", help="for aiperf: with a tokenizer.json")
    agreement.add_argument("--url", help="of a server that runs; else the fake upstream")
    agreement.add_argument("--model", default="fake-model")
    agreement.add_argument("--concurrency", type=int, default=4)
    agreement.add_argument("--requests", type=int, default=32)
    agreement.add_argument("--output-tokens", type=int, default=64)
    agreement.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.kind == "capacity":
        measure_capacity(arguments)
    else:
        measure_agreement(arguments)


# -- capacity


class WatchingClient(Client):
    """Keeps what came, to read the upstream's stamps afterwards."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.kept: list[Recording] = []

    async def post(self, path: str, body: bytes, recording: Recording | None = None) -> Recording:
        recording = await super().post(path, body, recording)
        self.kept.append(recording)
        return recording

    def delays(self) -> list[float]:
        """Returns the delay of every chunk, from the upstream's write to our stamp: both are CLOCK_MONOTONIC."""
        return [
            stamped_s - int(sent) / 1e9
            for recording in self.kept
            for stamped_s, part in zip(recording.times, recording.parts, strict=True)
            for sent in STAMP.findall(part)
        ]


def measure_capacity(arguments: argparse.Namespace) -> None:
    rows = []
    with fake_upstream() as url:
        os.sched_setaffinity(0, {LOAD_CORE})
        for in_phase in [False, True] * arguments.rounds:
            point, delays = uvloop.run(_capacity(url, arguments.streams, arguments.gap_ms, in_phase))
            delay, lag = Spread.of(delays), point.health.lag
            assert delay is not None
            assert lag is not None
            chunks_per_s = delay.count / point.wall_s
            rows.append(
                (
                    f"{arguments.streams}, {'at once' if in_phase else 'spread'}",
                    f"{chunks_per_s:,.0f}",
                    f"{point.health.cpu:.1%}",
                    f"{1e6 * point.health.cpu * point.wall_s / delay.count:.1f}",
                    ms(delay.p50),
                    ms(delay.p99),
                    ms(delay.most),
                    ms(lag.p99),
                    str(sum(point.errors.values())),
                ),
            )
    header = ["streams", "chunks/s", "CPU of one core", "µs a chunk", "stamp late ms, p50", "p99", "most"]
    print(table([*header, "own lag p99 ms", "failed"], rows))


async def _capacity(url: str, streams: int, gap_ms: int, in_phase: bool) -> tuple[Point, list[float]]:
    """Chunks come spread over the time, or from all streams at once, as from an engine that steps them together."""
    client = WatchingClient(url)
    source = Prompts([f"[[n=100 gap={gap_ms}]]"] * streams, 100)
    starts = (0.0 if in_phase else gap_ms / 1000 * number / streams * 10 for number in range(streams))
    try:
        run = await Load(client, Speech("fake-model"), Board()).open(source, starts, total=streams)
        return make_point("", streams, run, None), client.delays()
    finally:
        client.close()


# -- agreement


def measure_agreement(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as directory:
        if arguments.url:
            _agree(arguments, arguments.url, "", Path(directory))
        else:
            with fake_upstream() as url:
                _agree(arguments, url, f" [[n={arguments.output_tokens} gap=10]]", Path(directory))


def _agree(arguments: argparse.Namespace, url: str, marker: str, directory: Path) -> None:
    found: dict[str, list[dict[str, float]]] = {"penstock": [], "aiperf": []}
    for round_ in range(arguments.rounds + 1):  # the first warms up
        for tool in sorted(found, reverse=bool(round_ % 2)):
            before = _server_tpot(url)
            figures = (_penstock if tool == "penstock" else _aiperf)(arguments, url, marker, directory)
            if (after := _server_tpot(url))[1] > before[1]:
                figures["TPOT ms, mean, by the server"] = 1000 * (after[0] - before[0]) / (after[1] - before[1])
            print(f"round {round_} {tool}: {figures}", file=sys.stderr, flush=True)
            if round_:
                found[tool].append(figures)
    rows = []
    for name in found["penstock"][0]:
        ours, theirs = ([figures[name] for figures in found[tool]] for tool in ("penstock", "aiperf"))
        rows.append(
            (
                name,
                f"{median(ours):,.2f}",
                _range(ours),
                f"{median(theirs):,.2f}",
                _range(theirs),
                f"{median(ours) / median(theirs) - 1:+.1%}",
            )
        )
    print(table(("figure", "penstock", "its rounds", "aiperf", "its rounds", "difference"), rows))


def _server_tpot(url: str) -> tuple[float, float]:
    """Sum and count of what a penstock replica measures itself, of the same requests; zeros of any other server."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
        found = [
            [float(line.split()[-1]) for line in lines if line.startswith(f"penstock_tpot_seconds_{part}")]
            for part in ("sum", "count")
        ]
        return sum(found[0]), sum(found[1])
    return 0.0, 0.0


def _range(values: list[float]) -> str:
    return f"{min(values):,.2f} to {max(values):,.2f}"


def _prompts(arguments: argparse.Namespace, marker: str) -> list[str]:
    """New ones every time: nobody finds the other's in a cache."""
    source = random.Random(time.time_ns())
    return [text(COMMON, 100, source) + marker for _ in range(arguments.requests)]


def _penstock(arguments: argparse.Namespace, url: str, marker: str, directory: Path) -> dict[str, float]:
    prompts, out = directory / "ours.jsonl", directory / "ours.json"
    lines = [{"prompt": one, "output_tokens": arguments.output_tokens} for one in _prompts(arguments, marker)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "bench",
            "serve",
            "--url",
            url,
            "--model",
            arguments.model,
            "--concurrency",
            str(arguments.concurrency),
            "--prompts",
            str(prompts),
            "--json",
            str(out),
            "--quiet",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (point,) = json.loads(out.read_text())["points"]
    assert point["num_answers"] == arguments.requests, point["errors"]
    figures = {"requests/s": point["requests_per_s"], "output tokens/s": point["output_tokens_per_s"]}
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("end to end", "e2e")):
        figures |= {f"{name} ms, {part}": 1000 * point[key][part] for part in ("mean", "p50", "p99")}
    return figures


def _aiperf(arguments: argparse.Namespace, url: str, marker: str, directory: Path) -> dict[str, float]:
    prompts, out = directory / "theirs.jsonl", directory / "artifacts"
    lines = [{"text": one, "output_length": arguments.output_tokens} for one in _prompts(arguments, marker)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(
        [
            arguments.aiperf,
            "profile",
            "--url",
            url,
            "--model",
            arguments.model,
            "--endpoint-type",
            "chat",
            "--streaming",
            "--tokenizer",
            arguments.tokenizer,
            "--use-server-token-count",
            "--use-legacy-max-tokens",
            "--extra-inputs",
            "ignore_eos:true",
            "--extra-inputs",
            "temperature:0",
            "--input-file",
            str(prompts),
            "--custom-dataset-type",
            "single_turn",
            "--concurrency",
            str(arguments.concurrency),
            "--request-count",
            str(arguments.requests),
            "--ui",
            "none",
            "--artifact-dir",
            str(out),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    told: dict[str, Any] = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
    figures = {
        "requests/s": told["request_throughput"]["avg"],
        "output tokens/s": told["output_token_throughput"]["avg"],
    }
    names = (("TTFT", "time_to_first_token"), ("TPOT", "inter_token_latency"), ("end to end", "request_latency"))
    for name, key in names:
        figures |= {
            f"{name} ms, {part}": told[key]["avg" if part == "mean" else part] for part in ("mean", "p50", "p99")
        }
    return figures


# -- the fake upstream


@contextmanager
def fake_upstream() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        compile_tools(Path(directory), ["fakeup"])
        process = subprocess.Popen(["taskset", "-c", str(SERVER_CORE), f"{directory}/fakeup", str(port)])
        try:
            time.sleep(0.3)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
