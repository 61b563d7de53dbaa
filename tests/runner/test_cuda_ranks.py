"""Two ranks of one model on one GPU: real processes, symmetric memory, CUDA graphs, against the reference's tokens.

The two share the card by NVIDIA's MPS, where it is installed: without it each waits for the other's time slice in every
collective. Several layouts share it too: most of their time is imports, compilers and captures.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from penstock.link.mps import start_mps
from tests.devices import NEEDS_GPU

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module", autouse=True)
def mps(tmp_path_factory: pytest.TempPathFactory) -> None:
    start_mps(tmp_path_factory.mktemp("mps"))


def test_sums_go_by_symmetric_memory_and_by_nccl() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    commands = [[sys.executable, "-m", "tests.runner.sums_on_gpu", str(rank), port] for rank in range(2)]
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    both = [subprocess.Popen(command, stdout=pipe, stderr=joined, text=True) for command in commands]
    said = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], "\n".join(said)
    assert all("sums agree" in text for text in said)


SOAKED = ("tp=2", "pp=2", "tp=2 pp=2", "tp=2 sp=2", "tp=4 sp=2")
LAYOUTS = [("soak", layout) for layout in SOAKED] + [
    ("mixtral", "tp=2 ep=2"),
    ("qwen2-moe", "tp=2 ep=2"),
    ("qwen3-moe", "tp=2 pp=2 ep=2"),
    ("mixtral", "tp=2 ep=2 redundant_experts=1"),
    ("rebalance qwen3-moe", "tp=2 ep=2 redundant_experts=2"),
    ("rebalance qwen2-moe", "tp=2 pp=2 ep=2 redundant_experts=1"),
    ("gemma2", "tp=2"),
    ("phi3", "pp=2"),
    ("beside", "tp=2"),
    ("beside", "pp=2"),
    ("beside", "tp=2 pp=2"),
    ("gemma2", "tp=2 sp=2"),
    ("qwen3-moe", "tp=2 ep=2 sp=2"),
    ("phi3", "tp=2 pp=2 sp=2"),
    ("phi4", "tp=4 sp=4"),
]


NUM_AT_ONCE = 4

Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def under_way(request: pytest.FixtureRequest, mps: None) -> Iterator[dict[tuple[str, str], Future[Done]]]:
    """Every layout that is asked for, in a process of its own."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    asked = {(spec.params["what"], spec.params["layout"]) for spec in specs if spec and "layout" in spec.params}
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield {each: pool.submit(_run, *each) for each in LAYOUTS if each in asked}


def _run(what: str, layout: str) -> Done:
    return subprocess.run([sys.executable, "-m", "tests.parallel.on_gpu", what, layout], capture_output=True, text=True)


@pytest.mark.parametrize(("what", "layout"), LAYOUTS)
def test_ranks_say_what_one_would_and_leave_nothing_behind(
    what: str, layout: str, under_way: dict[tuple[str, str], Future[Done]]
) -> None:
    done = under_way[what, layout].result()
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
