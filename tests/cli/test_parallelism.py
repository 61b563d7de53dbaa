"""`penstock serve --tp`: the ranks that it says it has, and those that it refuses before any is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.cli.real_server import RealServer, tiny_server

pytestmark = pytest.mark.slow


def test_several_ranks_are_in_the_start_report_and_answer(tiny_model: Path) -> None:
    with tiny_server(tiny_model, "--tp", "2") as server:
        assert "  parallelism     tensor parallel 2\n" in server.banner
        answer = server.openai.completions.create(
            model=server.model, prompt="the quick brown fox", max_tokens=8, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


def test_ranks_that_cannot_share_a_shape_are_refused_by_the_dimension(tiny_model: Path) -> None:
    with pytest.raises(SystemExit, match=r"intermediate size of 128 cannot be split over 3 ranks.*work: 1, 2, 4"):
        main(["serve", str(tiny_model), "--load", "dummy", "--device", "cpu", "--port", "0", "--tp", "3"])


def test_several_ranks_transfer_kv_blocks(tiny_model: Path) -> None:
    with tiny_server(tiny_model, "--tp", "2", "--kv-port", "0") as server:
        assert re.search(r"KV transfer +port \d+, by shm or tcp", server.banner)


def test_kv_transfer_is_refused_where_ranks_are_on_several_machines(tiny_model: Path) -> None:
    words = ["serve", str(tiny_model), "--load", "dummy", "--device", "cpu", "--port", "0", "--tp", "2"]
    with pytest.raises(SystemExit, match=r"KV transfer needs all ranks on one machine: leave kv_port out"):
        main([*words, "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--kv-port", "0"])


def test_one_rank_says_nothing_of_parallelism(tiny: RealServer) -> None:
    assert "parallelism" not in tiny.banner
