"""A real server of a mixture over two ranks: what its experts were given, and experts that move under a stream."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.real_server import PATIENCE_S, RealServer, eventually, tiny_server, write_tiny_model

pytestmark = pytest.mark.slow

EXPERTS = "/v1/penstock/experts"
MIXTURE = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    write_tiny_model(path, **MIXTURE)
    with tiny_server(path, "--tp", "2", "--ep", "2", "--redundant-experts", "1", "--threads", "1") as found:
        yield found


def asked(server: RealServer, path: str, method: str = "GET") -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + path, method=method, headers=headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def answer(server: RealServer, tokens: int) -> str:
    given = {"model": server.model, "prompt": "the quick brown fox", "max_tokens": tokens, "temperature": 0}
    return server.openai.completions.create(**given, extra_body={"ignore_eos": True}).choices[0].text  # type: ignore[call-overload, no-any-return]


def exported(server: RealServer) -> dict[tuple[str, str], float]:
    return {
        (sample.name, next(iter(sample.labels.values()))): sample.value
        for family in server._families()
        for sample in family.samples
        if "expert" in sample.name
    }


def test_experts_are_counted_and_move_under_a_stream(server: RealServer) -> None:
    expected = answer(server, 40)
    load = eventually(lambda: asked(server, EXPERTS), lambda found: sum(found["layers"]["0"]["counts"]) > 2 * 40)
    layer = load["layers"]["1"]
    assert sum(layer["counts"]) == sum(layer["rank_tokens"]) == sum(load["layers"]["0"]["counts"])
    assert layer["ranks"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    metrics = eventually(lambda: exported(server), lambda found: ("penstock_rank_expert_tokens_total", "1") in found)
    assert metrics["penstock_expert_imbalance_ratio", "experts"] > 1
    assert metrics["penstock_expert_imbalance_ratio", "ranks"] >= 1
    snapshot = asked(server, "/v1/penstock/snapshot")
    assert snapshot["expert_imbalance"] >= 1

    given = {"model": server.model, "prompt": "on and on", "max_tokens": 20_000, "stream": True}
    with server.openai.completions.create(**given, extra_body={"ignore_eos": True}) as chunks:  # type: ignore[call-overload]
        next(chunks)
        report = asked(server, f"{EXPERTS}/rebalance", "POST")
        assert report["num_layers"] > 0
        assert report["imbalance_after"] < report["imbalance_before"]
        next(chunks)  # the stream goes on
        assert answer(server, 40) == expected
    eventually(lambda: asked(server, EXPERTS), lambda found: found["layers"]["1"]["ranks"] != layer["ranks"])

    def after_another_plan() -> list[list[list[int]]]:
        """The stream's tokens are what they are, and not every plan for them has copies: fewer may be more even."""
        answer(server, 40)
        asked(server, f"{EXPERTS}/rebalance", "POST")
        return [found["ranks"] for found in asked(server, EXPERTS)["layers"].values()]

    layers = eventually(after_another_plan, lambda layers: any(len(own) == 5 for ranks in layers for own in ranks))
    for ranks in layers:
        assert {expert for own in ranks for expert in own} == set(range(8))
        assert all(len(set(own)) == len(own) <= 5 for own in ranks)


def test_a_model_that_is_no_mixture_has_no_experts(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    with tiny_server(tmp_path, "--threads", "1") as server:
        for path, method, told in ((EXPERTS, "GET", "no mixture"), (f"{EXPERTS}/rebalance", "POST", "it needs --ep")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                asked(server, path, method)
            assert refused.value.code == 400
            assert told in refused.value.read().decode()
