"""Vectors, ranks and scores over HTTP, by the official client where it knows them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from penstock.api import relay
from penstock.engine.fake_embedder import DIMENSIONS, fake_vector
from tests.server.replica import NAME, Replica, serving


@pytest.fixture(scope="module")
def encoder() -> Iterator[Replica]:
    """A replica whose model only embeds."""
    with serving(generates=False) as found:
        yield found


def ids(replica: Replica, text: str) -> list[int]:
    return replica.model.tokenizer.encode(text, add_special_tokens=True)


def test_every_text_gets_its_vector(replica: Replica) -> None:
    texts = ["hello there", "a longer text than that", "x"]
    answer = replica.openai.embeddings.create(model=NAME, input=texts)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, text in zip(answer.data, texts, strict=True):
        assert one.embedding == pytest.approx(fake_vector(ids(replica, text)))
    count = sum(len(ids(replica, text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert answer.model == NAME


def test_all_forms_of_input_and_of_numbers_are_the_same(replica: Replica) -> None:
    text, client = "hello there", replica.openai.embeddings
    expected = client.create(model=NAME, input=text).data[0].embedding  # the client asks for base64
    token_ids = ids(replica, text)
    for given in ([text], token_ids, [token_ids]):
        found = client.create(model=NAME, input=given, encoding_format="float").data[0].embedding
        assert found == pytest.approx(expected, abs=1e-7)


def test_fewer_dimensions_can_be_had(replica: Replica) -> None:
    found = replica.openai.embeddings.create(model=NAME, input="hello", dimensions=3).data[0].embedding
    whole = fake_vector(ids(replica, "hello"))[:3]
    assert found == pytest.approx([one / math.hypot(*whole) for one in whole])
    with pytest.raises(openai.BadRequestError, match=f"vectors have {DIMENSIONS}"):
        replica.openai.embeddings.create(model=NAME, input="hello", dimensions=DIMENSIONS + 1)


def test_a_long_text_is_refused_or_cut_where_the_client_says_so(replica: Replica) -> None:
    most = replica.model.max_model_len
    token_ids = [5] * (most + 10)
    with pytest.raises(openai.BadRequestError, match=f"takes texts of {most} tokens"):
        replica.openai.embeddings.create(model=NAME, input=token_ids)
    for keep, left in ((-1, most), (7, 7)):
        cut = replica.openai.embeddings.create(model=NAME, input=token_ids, extra_body={"truncate_prompt_tokens": keep})
        assert cut.usage.prompt_tokens == left


@pytest.mark.parametrize(
    ("body", "status"),
    [({"input": ""}, 400), ({"input": [9999]}, 400), ({"input": "a", "model": "other"}, 404), ({}, 400)],
)
def test_bad_requests_are_refused(replica: Replica, body: dict[str, object], status: int) -> None:
    assert replica.post("/v1/embeddings", **body)[0] == status


def test_documents_are_ranked_by_an_encoder_as_their_vectors_go_with_the_querys(encoder: Replica) -> None:
    documents = ["completely different words here", "the query itself", "yet another"]
    status, _, answer = encoder.post("/v1/rerank", query="the query itself", documents=documents, top_n=2)
    assert status == 200
    first, second = answer["results"]
    assert (first["index"], first["document"]["text"]) == (1, documents[1])
    assert first["relevance_score"] == pytest.approx(1.0)
    query, other = (fake_vector(ids(encoder, text)) for text in ("the query itself", documents[second["index"]]))
    assert second["relevance_score"] == pytest.approx(sum(a * b for a, b in zip(query, other, strict=True)))
    assert answer["usage"]["prompt_tokens"] == sum(len(ids(encoder, t)) for t in [*documents, "the query itself"])


def test_documents_are_ranked_by_a_decoder_as_likely_as_they_make_the_query(replica: Replica) -> None:
    documents = ["long " * 9, "short", "longer " * 5]
    status, _, answer = replica.post("/v1/rerank", query="what?", documents=documents)
    assert status == 200
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]  # the fake model likes few tokens before it
    assert all(0 < one["relevance_score"] < 1 for one in answer["results"])


def test_pairs_are_scored(replica: Replica, encoder: Replica) -> None:
    def scores(asked: Replica, text_1: object, text_2: object) -> list[float]:
        status, _, answer = asked.post("/v1/score", text_1=text_1, text_2=text_2)
        assert status == 200
        assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
        return [one["score"] for one in answer["data"]]

    assert scores(encoder, "same", ["same", "other"])[0] == pytest.approx(1.0)
    assert scores(encoder, ["a", "b"], ["a", "b"]) == pytest.approx([1.0, 1.0])
    before = len(ids(replica, "first"))
    assert scores(replica, "first", ["x", "y"]) == pytest.approx([-before / 10] * 2)


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score"])
def test_other_paths_lead_there_too(encoder: Replica, path: str) -> None:
    query = {"queries": "a"} if path == "/score" else {"query": "a"}
    _, _, expected = encoder.post("/v1" + path.removeprefix("/v2"), documents=["a", "b"], **query)
    status, _, answer = encoder.post(path, documents=["a", "b"], **query)
    assert status == 200
    varying = ("id", "created")
    assert [answer[name] for name in answer if name not in varying] == [
        expected[name] for name in expected if name not in varying
    ]


def test_a_model_that_cannot_says_what_it_can(encoder: Replica) -> None:
    message = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings") as told:
        encoder.openai.chat.completions.create(model=NAME, messages=message)  # type: ignore[arg-type]
    assert told.value.code == "unsupported_task"
    for path in ("/v1/completions", "/v1/messages"):
        status, _, answer = encoder.post(path, prompt="a", messages=message, max_tokens=3)
        assert status == 400
        assert "makes vectors" in answer["error"]["message"]


def test_what_was_done_is_counted(encoder: Replica) -> None:
    before = encoder.final_metrics()
    encoder.openai.embeddings.create(model=NAME, input=["one", "two"])
    after = encoder.final_metrics()
    for name, count in (("texts", 2), ("tokens", len(ids(encoder, "one")) + len(ids(encoder, "two")))):
        key = f"penstock_embedded_{name}_total{{{NAME}}}"
        assert after[key] - before.get(key, 0) == count
    assert after[f"penstock_device_seconds_total{{{NAME},}}"] > 0


def test_a_gateway_is_told_what_it_cost_and_whose_it_was(encoder: Replica) -> None:
    body = {"model": NAME, "input": "hello"}
    _, headers, _ = encoder.call("POST", "/v1/embeddings", body, **{relay.NAMESPACE_HEADER: "acme"})
    cost = relay.read_cost(headers[relay.COST_HEADER].encode())
    assert cost is not None
    assert cost.device_s > 0
    assert relay.COST_HEADER not in encoder.call("POST", "/v1/embeddings", body)[1]
    assert encoder.final_metrics()[f"penstock_device_seconds_total{{{NAME},acme}}"] > 0


def test_a_replica_that_drains_takes_no_more() -> None:
    with serving() as leaving:
        leaving.call("POST", "/v1/penstock/drain")
        assert leaving.post("/v1/embeddings", input="a")[0] == 503
