"""`penstock serve` as a user starts it: a process of its own, with the default model."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import Patience
from tests.sdk import Unverified

MODEL = "smollm2"


@dataclass
class RealServer:
    process: subprocess.Popen[str]
    url: str
    banner: str  # what it printed until it was ready

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=Unverified(), timeout=60
        )

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    def metrics(self) -> dict[str, float]:
        """Those without labels, by name."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def is_idle(self) -> bool:
        names = ("sequences_running", "sequences_waiting", "kv_usage_ratio", "requests_open")
        metrics = self.metrics()
        return not any(metrics[f"penstock_{name}"] for name in names)

    def engine_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if "penstock.cli.engine_process" in child.cmdline())
        return engine


@contextlib.contextmanager
def real_server(*flags: str, model: str = MODEL) -> Iterator[RealServer]:
    command = [sys.executable, "-m", "penstock.cli.main", "serve", model, "--dtype", "float32", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        lines = []
        while not re.search("curl", "".join(lines)):
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            lines.append(line)
        banner = "".join(lines)
        found = re.search(r"https?://[^\s/]+", banner)
        assert found is not None
        yield RealServer(process, found.group(), banner)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def eventually(condition: Callable[[], bool], within_s: float) -> None:
    patience = Patience(within_s)
    while not condition():
        patience.look()
        time.sleep(0.01)
