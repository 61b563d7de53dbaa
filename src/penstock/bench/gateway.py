"""Gateways side by side: a very fast fake upstream behind them, a load generator in front, both in C and on core 1.

Every gateway is alone on core 0, measured in turns with the same load. CPU seconds are those of its process tree, from
/proc: on a machine that others use too they are steadier than rates. Linux only. Knows gateways as commands and ports.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from penstock.bench.machine import tree_usage
from penstock.bench.report import table
from penstock.core.errors import EngineFailed

GATEWAY_CORE, LOAD_CORE = "0", "1"
NUM_UPSTREAMS = 4
NUM_PROMPTS = 5000  # unrelated from their first words on
READY_TIMEOUT_S = 60.0
DIRECT = "direct"


@dataclass(frozen=True)
class Load:
    name: str
    arguments: tuple[str, ...]  # of lgen


LOADS = (
    Load("whole", ("-c", "64")),
    Load("stream", ("-c", "32", "-s", "-n", "64", "-g", "0")),
    Load("rate100", ("-c", "64", "-R", "100")),
    Load("open2000", ("-c", "2000", "-s", "-n", "60", "-g", "50", "-r", "3000", "-w", "4")),
)


@dataclass(frozen=True)
class Candidate:
    """A gateway. In its command {port} is where it shall listen, {ports} and {urls} are its upstreams."""

    name: str
    command: str
    key: str | None = None  # that its clients must show


@dataclass(frozen=True)
class Run:
    candidate: str
    load: str
    cpu_s: float
    rss_bytes: int
    told: dict[str, Any]  # what lgen says

    @property
    def req_per_cpu_s(self) -> float:
        return self.told["req_all"] / self.cpu_s if self.cpu_s else 0.0

    @property
    def chunks_per_cpu_s(self) -> float:
        return self.told["chunks_all"] / self.cpu_s if self.cpu_s else 0.0


def compile_tools(into: Path, names: Sequence[str] = ("lgen", "fakeup")) -> None:
    """The load generator and the fake upstream, from the C sources that come with penstock."""
    sources = Path(__file__).parent / "loadtools"
    for name in names:
        subprocess.run(["cc", "-O2", "-o", str(into / name), str(sources / f"{name}.c"), "-lm"], check=True)


def run_rounds(
    tools: Path, candidates: Sequence[Candidate], loads: Sequence[Load], *, num_rounds: int, seconds: float
) -> Iterator[Run]:
    """Every candidate meets every load once a round, taking turns; and the upstream without a gateway, for latency."""
    with ExitStack() as running:
        ports = [_free_port() for _ in range(NUM_UPSTREAMS)]
        running.enter_context(_process(_pinned(LOAD_CORE, [str(tools / "fakeup"), *map(str, ports)]), ports[0]))
        gateways: list[tuple[Candidate, int, int]] = []
        for candidate in candidates:
            port = _free_port()
            command = _pinned(GATEWAY_CORE, _filled(candidate.command, port, ports))
            gateways.append((candidate, port, running.enter_context(_process(command, port, candidate.key))))
        for round_ in range(num_rounds):
            turn = round_ % len(gateways)
            for load in loads:
                for candidate, port, pid in [*gateways[turn:], *gateways[:turn]]:
                    yield _measure(tools, candidate, load, port, pid, seconds)
                if load.name == "rate100":
                    yield _measure(tools, Candidate(DIRECT, ""), load, ports[0], None, seconds)


_LEGEND = (
    "Requests, of streams chunks, per second and per second of the gateway's CPU. Latency is p50 / p99: at rate100 "
    "what the gateway adds, at open2000 the p99 of TTFT, of the gap between chunks and of a chunk's way through."
)


def markdown(runs: Sequence[Run], candidates: Sequence[Candidate], loads: Sequence[Load]) -> str:
    """Medians; of the first candidate the ratio to the best of the others."""
    rows = []
    for load in loads:
        of_load = {
            candidate.name: [run for run in runs if (run.candidate, run.load) == (candidate.name, load.name)]
            for candidate in candidates
        }
        direct = [run for run in runs if (run.candidate, run.load) == (DIRECT, load.name)]
        for name, taken in of_load.items():
            others = [_score(load, runs_) for other, runs_ in of_load.items() if other != candidates[0].name]
            ratio = f"{_score(load, taken) / max(others):.2f}" if name == candidates[0].name and others else ""
            rows.append(
                (load.name, name, *_cells(load, taken, direct), _mid(r.rss_bytes / 2**20 for r in taken), ratio)
            )
    header = ("load", "gateway", "per s", "per CPU", "latency µs", "failed", "RSS MB", "ratio")
    return f"{_LEGEND}\n\n{table(header, rows)}"


def _score(load: Load, runs: Sequence[Run]) -> float:
    if load.name == "whole":
        return median(run.req_per_cpu_s for run in runs)
    if load.name == "stream":
        return median(float(run.told["chunks_s"]) for run in runs)
    return 1 / median(float(run.told["lat"]["p50"]) for run in runs)


def _cells(load: Load, runs: Sequence[Run], direct: Sequence[Run]) -> tuple[str, str, str, str]:
    is_stream = "-s" in load.arguments
    rate = _mid(run.told["chunks_s" if is_stream else "rps"] for run in runs)
    per_cpu = _mid(run.chunks_per_cpu_s if is_stream else run.req_per_cpu_s for run in runs)
    failed = str(sum(run.told["err"] + run.told["short"] + run.told["unfinished"] for run in runs))
    if direct:
        base = {p: median(run.told["lat"][p] for run in direct) for p in ("p50", "p99")}
        added = [median(run.told["lat"][p] for run in runs) - base[p] for p in ("p50", "p99")]
        return rate, per_cpu, f"added: {added[0]:,.0f} / {added[1]:,.0f}", failed
    if load.name == "open2000":
        ttft, gap, late = (_mid(run.told[key]["p99"] for run in runs) for key in ("ttft", "gapd", "fwd"))
        return rate, per_cpu, f"{ttft} {gap} {late}", failed
    return rate, per_cpu, " / ".join(_mid(run.told["lat"][p] for run in runs) for p in ("p50", "p99")), failed


def _mid(values: Iterable[float]) -> str:
    return f"{median(values):,.0f}"


def _measure(tools: Path, candidate: Candidate, load: Load, port: int, pid: int | None, seconds: float) -> Run:
    before = tree_usage(pid).cpu_s if pid is not None else 0.0
    command = [str(tools / "lgen"), "-p", str(port), "-t", str(seconds), "-G", str(NUM_PROMPTS), *load.arguments]
    if candidate.key is not None:
        command += ["-a", candidate.key]
    told = subprocess.run(_pinned(LOAD_CORE, command), check=True, capture_output=True, text=True).stdout
    after = tree_usage(pid) if pid is not None else None
    cpu_s, rss_bytes = (after.cpu_s - before, after.rss_bytes) if after is not None else (0.0, 0)
    return Run(candidate.name, load.name, cpu_s, rss_bytes, json.loads(told))


@contextmanager
def _process(command: Sequence[str], port: int, key: str | None = None) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port, key)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, key: str | None) -> None:
    """Routers listen before they know their workers: only a good answer counts."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise EngineFailed(f"{shlex.join(map(str, process.args))} ended with {process.returncode}")  # type: ignore[arg-type]
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
                body = b'{"model":"fake-model","messages":[{"role":"user","content":"hello"}]}'
                sock.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                    b"%bcontent-length: %d\r\n\r\n%b"
                    % (f"authorization: Bearer {key}\r\n".encode() if key else b"", len(body), body)
                )
                if sock.recv(12) == b"HTTP/1.1 200":
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise EngineFailed(f"nothing answers on port {port}")


def _pinned(core: str, command: Sequence[str]) -> list[str]:
    return ["taskset", "-c", core, *command]


def _filled(command: str, port: int, ports: Sequence[int]) -> list[str]:
    urls = " ".join(f"http://127.0.0.1:{one}" for one in ports)
    return shlex.split(command.format(port=port, ports=" ".join(map(str, ports)), urls=urls))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
