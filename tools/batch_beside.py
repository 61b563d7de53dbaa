"""Interactive requests with and without a batch beside them: `python -m tools.batch_beside [--rounds 3]`.

Starts `penstock serve smollm2 --replicas 2` in a home of its own. Rounds take turns: the same open-loop load alone, and
with a batch that never ends. What the batch answers meanwhile is counted: spare capacity that is not used is no merit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import openai

from penstock.hub.home import penstock_home

MODEL = "smollm2"
ROWS = 20_000
CACHES = ("models", "kernels", "packed", "formats")


class Round(NamedTuple):
    ttft_s: list[float]
    tpot_s: list[float]
    rows: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.batch_beside", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rate", type=float, default=1.0, help="interactive requests a second")
    arguments = parser.parse_args()
    with serving() as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        measure(url, 5.0, arguments.rate)  # warm
        found: dict[str, list[Round]] = {"alone": [], "beside a batch": []}
        for _ in range(arguments.rounds):
            found["alone"].append(measure(url, arguments.seconds, arguments.rate))
            with batch(client) as num_done:
                before = num_done()
                took = measure(url, arguments.seconds, arguments.rate)
                found["beside a batch"].append(took._replace(rows=num_done() - before))
    seconds = arguments.rounds * arguments.seconds
    print("| interactive requests | number | TTFT p50 | p95 | longest | TPOT p50 | rows a second |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, rounds in found.items():
        ttft, tpot = (sorted(chain(*values)) for values in zip(*(one[:2] for one in rounds), strict=True))
        told = [quantile(ttft, 0.5), quantile(ttft, 0.95), ttft[-1], statistics.median(tpot)]
        rows = sum(one.rows for one in rounds) / seconds
        print(
            f"| {name} | {len(ttft)} | " + " | ".join(f"{1000 * value:.0f} ms" for value in told) + f" | {rows:.1f} |"
        )


@contextmanager
def serving() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        for name in CACHES:
            (home / name).symlink_to((penstock_home() / name).absolute())
        command = [sys.executable, "-m", "penstock", "serve", MODEL, "--replicas", "2", "--port", "0"]
        environment = os.environ | {"PENSTOCK_HOME": directory}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                url = ""
                for line in process.stdout:
                    if line.strip().startswith("curl "):
                        break
                    if line.startswith("penstock serves"):
                        url = next(word for word in line.split() if word.startswith("http"))
                yield url
            finally:
                process.terminate()


@contextmanager
def batch(client: openai.OpenAI) -> Iterator[Any]:
    """Runs a batch of more rows than there is time for; what is told is how many are done."""
    body = {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Tell me about rivers."}]}
    rows = (
        json.dumps(
            {"custom_id": str(one), "method": "POST", "url": "/v1/chat/completions", "body": body | {"seed": one}}
        )
        for one in range(ROWS)
    )
    file = client.files.create(file=("rows.jsonl", "\n".join(rows).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

    def num_done() -> int:
        counts = client.batches.retrieve(made.id).request_counts
        return counts.completed + counts.failed if counts is not None else 0

    while not num_done():
        time.sleep(0.2)
    try:
        yield num_done
    finally:
        client.batches.cancel(made.id)
        while client.batches.retrieve(made.id).status != "cancelled":
            time.sleep(0.2)


def measure(url: str, seconds: float, rate: float) -> Round:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        load = ["--rate", str(rate), "--duration", str(seconds), "--prompt-tokens", "64:256", "--output-tokens", "32"]
        command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", url, *load, "--json", str(report)]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        requests = json.loads(report.read_text())["points"][0]["requests"]
    return Round([one["ttft_s"] for one in requests], [one["tpot_s"] for one in requests], 0)


def quantile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
