import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.bench.gateway import DIRECT, LOADS, Candidate, Run, compile_tools, markdown
from tests.waiting import eventually


def run(candidate: str, load: str, cpu_s: float, p50: float) -> Run:
    latency = {"p50": p50, "p99": 3 * p50}
    told = {"req_all": 1000, "rps": 900.0, "chunks_all": 0, "chunks_s": 0.0, "err": 0, "short": 0, "unfinished": 0}
    return Run(candidate, load, cpu_s, 50 << 20, {**told, "lat": latency})


def test_first_gateway_is_compared_by_cpu_and_its_latency_is_what_it_adds():
    candidates = [Candidate("ours", ""), Candidate("peer", "")]
    loads = [load for load in LOADS if load.name in ("whole", "rate100")]
    runs = [run("ours", "whole", cpu_s, 100.0) for cpu_s in (0.1, 0.05, 0.4)]
    runs += [run("peer", "whole", 0.2, 100.0), run("ours", "rate100", 0.1, 250.0), run("peer", "rate100", 0.1, 500.0)]
    runs += [run(DIRECT, "rate100", 0.0, 50.0)]
    lines = [line for line in markdown(runs, candidates, loads).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[2] == ["whole", "ours", "900", "10,000", "100 / 300", "0", "50", "2.00"]
    assert rows[3] == ["whole", "peer", "900", "5,000", "100 / 300", "0", "50", ""]
    assert rows[4][4] == "added: 200 / 600"


def test_the_table_fits_a_hundred_columns():
    far = {key: {"p50": 123_456.0, "p99": 234_567.0} for key in ("lat", "ttft", "gapd", "fwd")}
    told = {"req_all": 10**6, "rps": 1e5, "chunks_all": 10**6, "chunks_s": 2e5, "err": 0, "short": 0, "unfinished": 0}
    candidates = [Candidate("penstock", ""), Candidate("sglang-router", "")]
    runs = [Run(one.name, load.name, 5.0, 300 << 20, told | far) for one in candidates for load in LOADS]
    runs += [Run(DIRECT, "rate100", 0.0, 0, told | far)]
    lines = [line for line in markdown(runs, candidates, LOADS).splitlines() if line.startswith("|")]
    assert max(map(len, lines)) <= 100


@pytest.mark.slow  # two C programs are compiled
def test_the_load_generator_and_the_fake_upstream_work_together(tmp_path: Path):
    compile_tools(tmp_path)
    with fake_upstream(tmp_path / "fakeup") as port:
        command = [tmp_path / "lgen", "-p", str(port), "-c", "2", "-t", "0.2", "-w", "0", "-s", "-n", "4", "-g", "0"]
        told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert told["req_all"] > 0
    assert told["err"] == told["short"] == 0
    assert told["chunks_all"] >= 4 * told["req_all"]


@contextmanager
def fake_upstream(program: Path) -> Iterator[int]:
    """It cannot be asked which port it took, so it is given ones that were free a moment ago until it takes one."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with subprocess.Popen([program, str(port)], stderr=subprocess.DEVNULL) as process:
            try:
                if eventually(lambda: process.poll() is not None or answers(port)) and process.poll() is None:  # noqa: B023
                    yield port
                    return
            finally:
                process.kill()
    raise AssertionError("no free port")


def answers(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
