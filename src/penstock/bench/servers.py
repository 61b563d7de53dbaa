"""The servers under load: one that runs already, or a child of ours for as long as the measuring takes."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.bench.machine import listening_pid
from penstock.core.errors import ConfigError, EngineFailed

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.01


@dataclass(frozen=True)
class Server:
    name: str
    url: str
    model: str  # the id it serves its model under
    pid: int | None  # None: not on this machine, or not ours to see
    ready_s: float | None = None  # from its start to its first answer; None: not started by us


def attach(name: str, url: str) -> Server:
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = _first_model(url)
        pid = _local_pid(url)
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"no OpenAI-compatible server answers at {url}: {error}") from None
    return Server(name, url, model, pid)


@contextmanager
def started(name: str, command: Sequence[str]) -> Iterator[Server]:
    """Run a command that prints its URL. What it says on stderr is the user's to see."""
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = _printed_url(process)
        model = _wait_for_model(url, process, began_s + READY_TIMEOUT_S)
        ready_s = time.monotonic() - began_s
        yield Server(name, url, model, _local_pid(url), ready_s)
    finally:
        _stop(process)


def _printed_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"https?://[^\s/]+", line):
            return found.group()
    raise EngineFailed(f"the server to measure ended with status {process.wait()} before it was ready")


def _wait_for_model(url: str, process: subprocess.Popen[str], deadline_s: float) -> str:
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            return _first_model(url)
        except OSError:  # printed, but not listening yet
            time.sleep(POLL_S)
    raise EngineFailed(f"the server to measure does not answer at {url}")


def _first_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def _local_pid(url: str) -> int | None:
    parts = urlsplit(url)
    is_local = parts.hostname in ("127.0.0.1", "localhost", "::1")
    return listening_pid(parts.port or 80) if is_local else None


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
