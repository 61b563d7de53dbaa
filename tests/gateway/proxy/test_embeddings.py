"""Vectors through the door: routed, limited, counted and charged by their input tokens."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from penstock.engine.fake_embedder import fake_vector
from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.prices import Price
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually


@pytest.fixture(scope="module")
def replica(replica_at_hand: Replica) -> Replica:
    return replica_at_hand


@pytest.fixture(scope="module")
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    pool = ModelSettings(replicas=[f"http://{replica.host}:{replica.port}"], price=Price(input=2.0))
    with running_gateway(pools={NAME: pool}) as found:
        yield found
        eventually(found.is_idle)


def ids(replica: Replica, text: str) -> list[int]:
    return replica.model.tokenizer.encode(text, add_special_tokens=True)


def test_vectors_are_the_replicas_and_their_tokens_are_charged(gateway: RunningGateway, replica: Replica) -> None:
    key = gateway.add_tenant("acme")
    texts = ["hello there", "and another"]
    answer = gateway.client(key).embeddings.create(model=NAME, input=texts)
    for one, text in zip(answer.data, texts, strict=True):
        assert one.embedding == pytest.approx(fake_vector(ids(replica, text)))
    eventually(lambda: bool(gateway.ledger.usages) and gateway.ledger.usages[-1].tenant_id == "acme")
    usage = gateway.ledger.usages[-1]
    count = sum(len(ids(replica, text)) for text in texts)
    assert (usage.input_tokens, usage.output_tokens, usage.model) == (count, 0, NAME)
    assert usage.cost_nanos == count * 2000
    assert usage.device_us > 0
    eventually(gateway.is_idle)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "what", "documents": ["one", "two"]}),
        ("/v2/rerank", {"query": "what", "documents": ["one", "two"]}),
        ("/v1/score", {"text_1": "what", "text_2": ["one", "two"]}),
        ("/score", {"queries": "what", "documents": ["one", "two"]}),
    ],
)
def test_ranks_and_scores_pass_and_are_charged(gateway: RunningGateway, path: str, body: dict[str, object]) -> None:
    key = gateway.add_tenant("ranked")
    before = len(gateway.ledger.usages)
    found = gateway.client(key).post(gateway.url + path, body={"model": NAME, **body}, cast_to=dict[str, object])
    eventually(lambda: len(gateway.ledger.usages) > before)
    usage = found["usage"]
    assert isinstance(usage, dict)
    assert gateway.ledger.usages[-1].input_tokens == usage["prompt_tokens"] > 0


def test_limits_are_the_tenants(gateway: RunningGateway) -> None:
    few = gateway.client(gateway.add_tenant("few", limits={"tokens_per_minute": 80}))
    few.embeddings.create(model=NAME, input="short")
    with pytest.raises(openai.BadRequestError, match="more than this tenant's whole limit of 80 tokens per minute"):
        few.embeddings.create(model=NAME, input=["word " * 40] * 5)
    small = gateway.client(gateway.add_tenant("small", limits={"max_input": 30}))
    small.embeddings.create(model=NAME, input="short")
    with pytest.raises(openai.BadRequestError, match="limit is 30"):
        small.embeddings.create(model=NAME, input=["word " * 400] * 5)
    other = gateway.client(gateway.add_tenant("other", models=["nothing-*"]))
    with pytest.raises(openai.NotFoundError):
        other.embeddings.create(model=NAME, input="short")


def test_texts_take_no_room_in_the_cache_so_more_than_it_holds_may_come_at_once(
    gateway: RunningGateway, replica: Replica
) -> None:
    most = replica.model.max_model_len
    texts = [[5] * (most // 2)] * 40
    client = gateway.client(gateway.add_tenant("large"))
    running = client.completions.create(model=NAME, prompt="go on", max_tokens=200, stream=True)
    next(iter(running))
    assert client.embeddings.create(model=NAME, input=texts).usage.prompt_tokens == 40 * (most // 2)
    running.close()


def test_what_was_embedded_teaches_nothing_about_how_long_answers_are(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("both")
    before = gateway.app.lengths.expected("both", NAME, 1000)
    for _ in range(5):
        gateway.client(key).embeddings.create(model=NAME, input="hello")
    eventually(gateway.is_idle)
    assert gateway.app.lengths.expected("both", NAME, 1000) == before


def test_a_refusal_of_the_replica_comes_through(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("wrong")
    with pytest.raises(openai.BadRequestError, match="no token has the id"):
        gateway.client(key).embeddings.create(model=NAME, input=[99999])
