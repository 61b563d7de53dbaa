"""`penstock serve` on two nodes, as their users start it: node 0 with the server, node 1 with ranks alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from penstock.runner.ranks.gathering import bind_here
from tests.cli.real_server import FORMAT, tiny_server
from tests.template import forking
from tests.waiting import eventually

pytestmark = pytest.mark.slow

OPEN = ("--load", "dummy", "--dtype", "float32", "--max-loras", "0", "--device", "cpu", "--threads", "1")
SHAPE = (*OPEN, "--tp", "2")


class Node:
    """Node 1, and what it prints."""

    def __init__(self, model: Path, log: Path, *flags: str, shape: tuple[str, ...] = SHAPE) -> None:
        self._log = log
        with log.open("ab") as out:
            command = [sys.executable, "-m", "penstock.cli.main", "serve", str(model), *FORMAT, *shape, *flags]
            environment = os.environ | forking()
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=environment)

    def text(self) -> str:
        return self._log.read_text()


@contextlib.contextmanager
def ended(nodes: list[Node]) -> Iterator[None]:
    try:
        yield
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)
            node.process.wait()


def test_a_node_is_killed_and_replaced_and_a_wrong_one_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RANKS_SECRET", "a secret")
    nodes: list[Node] = []

    def start(name: str, *flags: str) -> Node:
        nodes.append(Node(tiny_model, tmp_path / name, *here, "--node-rank", "1", "--node-host", "127.0.0.2", *flags))
        return nodes[-1]

    with bind_here("127.0.0.1", 0, or_anywhere=False) as reserved, ended(nodes):
        here = ("--nnodes", "2", "--master-addr", f"127.0.0.1:{reserved.getsockname()[1]}")
        first = start("first")
        eventually(first.text, lambda text: "node 1 waits for the leader" in text)
        assert "nodes: 2, of which this is node 1" in first.text()
        with tiny_server(tiny_model, *SHAPE, *here, "--node-rank", "0") as server:
            assert "of which this is node 0" in server.banner
            assert "(by nnodes, node_rank, master_addr)" in server.banner
            words = {"model": server.model, "prompt": "the quick brown fox", "temperature": 0}
            before = server.openai.completions.create(**words, max_tokens=8)  # type: ignore[call-overload]
            stream = server.openai.completions.create(**words, max_tokens=60_000, stream=True)  # type: ignore[call-overload]
            next(iter(stream))
            first.process.kill()
            with pytest.raises(openai.APIError, match=r"rank 1 of the model \(node 1, 127.0.0.2\) is lost"):
                for _ in stream:
                    pass
            wrong = start("wrong", "--tp", "1", "--pp", "2")
            assert wrong.process.wait() == 1
            assert "refuses node 1: tp is 2 at the leader and 1 on node 1; pp is 1 at the leader and 2" in wrong.text()
            second = start("second", "--drain-timeout", "600")
            eventually(lambda: server.status("/ready"), lambda status: status == 200)
            second.process.terminate()  # as all nodes are; it stays for as long as the leader does
            after = server.openai.completions.create(**words, max_tokens=8)  # type: ignore[call-overload]
            assert after.choices[0].text == before.choices[0].text
        assert second.process.wait() == 0
        assert "the leader has ended" in second.text()


def test_nodes_of_which_nobody_says_more_are_a_pipeline(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_RANKS_SECRET", "a secret")
    with bind_here("127.0.0.1", 0, or_anywhere=False) as reserved:
        here = ("--nnodes", "2", "--master-addr", f"127.0.0.1:{reserved.getsockname()[1]}")
        other = Node(tiny_model, tmp_path / "log", *here, "--node-rank", "1", "--node-host", "127.0.0.2", shape=OPEN)
        with ended([other]), tiny_server(tiny_model, *OPEN, *here, "--node-rank", "0") as server:
            assert "pipeline parallel 2" in server.banner
            words = {"model": server.model, "prompt": "the quick brown fox", "temperature": 0}
            assert server.openai.completions.create(**words, max_tokens=8).choices[0].text  # type: ignore[call-overload]
            assert "node 1 starts rank 1 for the leader" in other.text()
