"""`--load dummy`: a server of a model whose weights are not there, as a benchmark of a large one needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.cli.real_server import RealServer

pytestmark = pytest.mark.slow


def test_it_says_so_and_answers_with_as_many_tokens_as_asked(tiny: RealServer) -> None:
    assert "random weights" in tiny.banner
    answer = tiny.openai.completions.create(
        model=tiny.model, prompt="the quick brown fox", max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40


def test_the_workloads_of_a_gpu_run_through_its_http_api(tiny: RealServer, tiny_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    url = f"penstock={tiny.url}"
    words = ["--url", url, "--model", str(tiny_model), "--workload", "W1,W1b", "--rounds", "1", "--json", str(report)]
    main(["bench", "http", *words])
    one, eight = json.loads(report.read_text())["measurements"]
    assert (one["workload"], one["output_tokens"], one["prompt_tokens"]) == ("W1", 256, 128)
    assert (eight["workload"], eight["output_tokens"], eight["failures"]) == ("W1b", 8 * 256, [])


def test_a_bench_over_http_needs_a_server(tiny_model: Path) -> None:
    with pytest.raises(SystemExit, match="which server"):
        main(["bench", "http", "--model", str(tiny_model)])
