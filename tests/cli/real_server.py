"""`penstock serve` as a user starts it, a process of its own: with the default model, or with a small random one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import openai
import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.tiny_model import TINY_CONTEXT, write_tiny_model
from tests.sdk import Unverified
from tests.template import engine_of, forking
from tests.waiting import eventually

__all__ = ["MODEL", "TINY_CONTEXT", "RealServer", "eventually", "real_server", "tiny_server", "write_tiny_model"]

MODEL = "smollm2"
# The format whose answers no measurement of this machine decides, and in half the time that float32 takes.
FORMAT = ("--dtype", "bfloat16", "--quant", "none")
PATIENCE_S = 300  # of a client, on a busy machine

# KV blocks leave the device for host memory and disk while copying one is faster than computing it. In a model of this
# shape computing takes many times as long, so that this is so on a busy machine too.
SLOW = {"hidden_size": 256, "intermediate_size": 2048, "num_key_value_heads": 1}


@dataclass
class RealServer:
    process: subprocess.Popen[str]
    url: str
    banner: str  # what it printed until it was ready
    model: str  # the id that clients use

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=Unverified(), timeout=PATIENCE_S
        )

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def metrics(self) -> dict[str, float]:
        """Those without labels, by name."""
        return {
            sample.name: sample.value for family in self._families() for sample in family.samples if not sample.labels
        }

    def outcomes(self) -> Counter[str]:
        """Requests that ended, by how they did."""
        found: Counter[str] = Counter()
        for family in self._families():
            for sample in family.samples:
                if sample.name == "penstock_requests_total":
                    found[sample.labels["outcome"]] += int(sample.value)
        return found

    def left_over(self) -> dict[str, float]:
        """Gauges of unfinished work that are not zero."""
        names = ("sequences_running", "sequences_waiting", "kv_usage_ratio", "requests_open")
        metrics = self.metrics()
        return {name: value for name in names if (value := metrics[f"penstock_{name}"])}

    def is_idle(self) -> bool:
        return not self.left_over()

    def engine_process(self) -> psutil.Process:
        return engine_of(self.process.pid)

    def _families(self) -> Iterator[Metric]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_S) as response:
            return iter(list(text_string_to_metric_families(response.read().decode())))


@contextlib.contextmanager
def real_server(
    *flags: str, model: str | None = MODEL, forks: bool = True, of_engine: Sequence[str] = FORMAT
) -> Iterator[RealServer]:
    """`model`: None: the flags name some. `forks`: its engine and ranks are forked from the tests' template; else each
    is executed. `of_engine`: more flags, that not all models take."""
    named = [] if model is None else [model]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", *named, *of_engine, "--port", "0", *flags]
    environment = os.environ | (forking() if forks else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    assert process.stdout is not None
    try:
        lines = []
        while not re.search("curl", "".join(lines)):
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            lines.append(line)
        banner = "".join(lines)
        found = re.search(r"https?://[^\s/,]+", banner)
        assert found is not None
        yield RealServer(process, found.group(), banner, Path(model or "").name)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def tiny_server(directory: Path, *flags: str, forks: bool = True) -> contextlib.AbstractContextManager[RealServer]:
    """A server of the random model in `directory`: for tests in which no text has to make sense."""
    return real_server("--load", "dummy", "--dtype", "float32", *flags, model=str(directory), forks=forks)
