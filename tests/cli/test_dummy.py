"""`--load dummy`: a server of a model whose weights are not there, as a benchmark of a large one needs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.cli.real_server import RealServer, real_server
from tests.text.small import byte_level, load

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary larger than the tokenizer's, as many models have it."""
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text(load(byte_level()).to_json())
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[RealServer]:
    with real_server("--load", "dummy", model=str(directory)) as found:
        yield found


def test_it_says_so_and_answers_with_as_many_tokens_as_asked(server: RealServer, directory: Path) -> None:
    assert "random weights" in server.banner
    answer = server.openai.completions.create(
        model=directory.name, prompt="the quick brown fox", max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40


def test_the_workloads_of_a_gpu_run_through_its_http_api(server: RealServer, directory: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    url = f"penstock={server.url}"
    words = ["--url", url, "--model", str(directory), "--workload", "W1,W1b", "--rounds", "1", "--json", str(report)]
    main(["bench", "http", *words])
    one, eight = json.loads(report.read_text())["measurements"]
    assert (one["workload"], one["output_tokens"], one["prompt_tokens"]) == ("W1", 256, 128)
    assert (eight["workload"], eight["output_tokens"], eight["failures"]) == ("W1b", 8 * 256, [])


def test_a_bench_over_http_needs_a_server(directory: Path) -> None:
    with pytest.raises(SystemExit, match="which server"):
        main(["bench", "http", "--model", str(directory)])
