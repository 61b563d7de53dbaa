"""Texts that ONNX models read: at a replica and through a gateway, as the endpoints of encoders have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.gateway.settings.gateway import ModelSettings as PoolSettings
from penstock.tenancy.prices import Price
from tests.gateway.running import RunningGateway, running_gateway
from tests.tensors.models import WORDS, save_classifier, save_reader, table
from tests.tensors.serving import Served, serving
from tests.waiting import eventually

LABELS = ["bad", "so-so", "good"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("repository")
    paths = {
        "embedder": save_reader(root / "embedder"),
        "sentiment": save_reader(root / "sentiment", LABELS),
        "topics": save_reader(root / "topics", LABELS, problem_type="multi_label_classification"),
        "ranker": save_reader(root / "ranker", ["relevant"]),
        "plain": save_classifier(root / "plain/model.onnx").parent,
    }
    with serving(root, paths=lambda: paths) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(served: Served) -> Iterator[RunningGateway]:
    pools = {
        name: PoolSettings(replicas=[served.url], served_as=name, price=Price(input=2.0))
        for name in ("embedder", "sentiment", "ranker")
    }
    with running_gateway(pools=pools) as found:
        eventually(lambda: all(found.app.can_serve(name) for name in pools))
        yield found
        eventually(found.is_idle)


def ids(text: str) -> list[int]:
    return [2, *(WORDS.index(word) for word in text.split()), 3]


def states(text: str, times: int = 1) -> np.ndarray:
    return times * table()[ids(text)]


def vector(text: str) -> np.ndarray:
    mean = states(text).mean(axis=0)
    return mean / np.linalg.norm(mean)


def post(served: Served, path: str, **body: Any) -> Any:
    status, answer = served.call("POST", path, body)
    assert status == 200, answer
    return answer


def refused(served: Served, path: str, **body: Any) -> tuple[int, str, str]:
    status, answer = served.call("POST", path, body)
    return status, answer["error"]["code"], answer["error"]["message"]


def test_embeddings_are_pooled_states_of_length_one(served: Served) -> None:
    texts = ["a b", "c", "a b c d e f g h i j", "j"]
    answer = post(served, "/v1/embeddings", model="embedder", input=texts)
    found = np.array([one["embedding"] for one in answer["data"]])
    assert np.allclose(found, [vector(text) for text in texts], atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in texts)
    by_ids = post(served, "/v1/embeddings", model="embedder", input=[ids("a b")], dimensions=2)
    short = vector("a b")[:2]
    assert np.allclose(by_ids["data"][0]["embedding"], short / np.linalg.norm(short), atol=1e-6)


def test_pooling_is_the_one_that_is_written_down(tmp_path: Path) -> None:
    path = save_reader(tmp_path / "first")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with serving(path) as served:
        answer = post(served, "/v1/embeddings", model="first", input="a b")
        first = table()[2]
        assert np.allclose(answer["data"][0]["embedding"], first / np.linalg.norm(first), atol=1e-6)


def test_classes_have_their_names_and_probabilities(served: Served) -> None:
    for path in ("/classify", "/v1/classify"):
        answer = post(served, path, model="sentiment", input=["a b", "c"])
        for one, text in zip(answer["data"], ("a b", "c"), strict=True):
            logits = states(text).sum(axis=0)[:3]
            wanted = np.exp(logits) / np.exp(logits).sum()
            assert np.allclose(one["probs"], wanted, atol=1e-6)
            assert (one["label"], one["num_classes"]) == (LABELS[int(wanted.argmax())], 3)
            assert list(one["scores"]) == LABELS
        assert answer["usage"]["prompt_tokens"] == 7
    many = post(served, "/classify", model="topics", input="a b")["data"][0]["probs"]
    assert np.allclose(many, 1 / (1 + np.exp(-states("a b").sum(axis=0)[:3])), atol=1e-6)
    raw = post(served, "/classify", model="topics", input="a b", use_activation=False)["data"][0]["probs"]
    assert np.allclose(raw, states("a b").sum(axis=0)[:3], atol=1e-5)


def test_reranker_reads_both_texts_at_once(served: Served) -> None:
    def score(query: str, text: str) -> float:
        second = 2 * table()[[*ids(text)[1:]]]
        return float(1 / (1 + np.exp(-(states(query).sum(axis=0) + second.sum(axis=0))[0])))

    documents = ["a b", "c", "d e f"]
    answer = post(served, "/v1/rerank", model="ranker", query="j", documents=documents)
    found = {one["index"]: one["relevance_score"] for one in answer["results"]}
    assert found == pytest.approx({number: score("j", text) for number, text in enumerate(documents)}, abs=1e-6)
    assert list(found) == sorted(found, key=lambda number: -found[number])
    scores = post(served, "/v1/score", model="ranker", text_1="j", text_2=documents)["data"]
    assert [one["score"] for one in scores] == pytest.approx([score("j", text) for text in documents], abs=1e-6)
    cut = post(served, "/v1/score", model="ranker", text_1="j", text_2="a b c d", truncate_prompt_tokens=6)
    assert cut["data"][0]["score"] == pytest.approx(score("j", "a b"), abs=1e-6)
    assert cut["usage"]["prompt_tokens"] == 6


def test_embedder_ranks_by_the_cosine(served: Served) -> None:
    answer = post(served, "/v1/score", model="embedder", text_1="a", text_2=["a", "b"])
    wanted = [1.0, float(vector("a") @ vector("b"))]
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "code", "why"),
    [
        ("/classify", {"model": "embedder", "input": "a"}, "unsupported_task", "/v1/embeddings"),
        ("/v1/embeddings", {"model": "sentiment", "input": "a"}, "unsupported_task", "/v1/classify"),
        ("/v1/rerank", {"model": "sentiment", "query": "a", "documents": ["b"]}, "unsupported_task", "/v1/classify"),
        ("/v1/embeddings", {"model": "plain", "input": "a"}, "unsupported_task", "no tokenizer.json"),
        ("/v1/embeddings", {"model": "nobody", "input": "a"}, "model_not_found", "no model 'nobody'"),
        ("/v1/embeddings", {"model": "embedder", "input": "a " * 40}, "context_length_exceeded", "takes texts of 16"),
        ("/v1/embeddings", {"model": "embedder", "input": [99]}, "invalid_request", "99"),
        ("/classify", {"model": "sentiment", "input": []}, "invalid_request", "input"),
        ("/classify", {"model": "sentiment", "input": "a", "labels": 3}, "invalid_request", "labels"),
        (
            "/v1/score",
            {"model": "ranker", "text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4},
            "invalid_request",
            "truncate_prompt_tokens",
        ),
        ("/v1/chat/completions", {"model": "embedder", "messages": []}, "unsupported_task", "make no texts"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(
    served: Served, path: str, body: dict[str, Any], code: str, why: str
) -> None:
    status, found, message = refused(served, path, **body)
    assert (status in (400, 404), found) == (True, code), message
    assert why in message


def test_many_texts_do_not_fill_the_queue(tmp_path: Path) -> None:
    path = save_reader(tmp_path / "embedder")
    policy = {"max_batch_size": 2, "dynamic_batching": {"default_queue_policy": {"max_queue_size": 4}}}
    (path / "config.yaml").write_text(json.dumps(policy))
    with serving(path) as served:
        texts = [" ".join(WORDS[4 : 5 + number % 7]) for number in range(60)]
        answer = post(served, "/v1/embeddings", model="embedder", input=texts)
        found = np.array([one["embedding"] for one in answer["data"]])
        assert np.allclose(found, [vector(text) for text in texts], atol=1e-6)
        metrics = served.call("GET", "/metrics")[1].decode()
        assert 'penstock_embedded_texts_total{model="embedder"} 60' in metrics
        assert 'penstock_tensor_rows_total{model="embedder",version="1"} 60' in metrics


def test_gateway_routes_limits_and_charges_texts(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("acme")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "embedder", "input": ["a b", "c"]},
        "/v1/classify": {"model": "sentiment", "input": ["a b", "c"]},
        "/classify": {"model": "sentiment", "input": ["a b", "c"]},
    }
    for number, (path, body) in enumerate(bodies.items(), 1):
        answer = gateway.client(key).post(gateway.url + path, body=body, cast_to=dict[str, Any])
        assert answer["usage"]["total_tokens"] == 7
        eventually(lambda number=number: len(gateway.ledger.usages) >= number)
        usage = gateway.ledger.usages[-1]
        assert (usage.input_tokens, usage.output_tokens, usage.model) == (7, 0, body["model"])
        assert usage.cost_nanos == 14_000
        assert usage.device_us > 0
    assert 'surface="classify"' in gateway.metrics()
