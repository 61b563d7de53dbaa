"""The door with real clients, in front of two replicas that are real but for the model."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import openai
import pytest

from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.server.replica import NAME, Replica, engines_paused, serving
from tests.waiting import GIVE_UP_S, eventually

MESSAGES: Any = [{"role": "user", "content": "the first and the second"}]


@pytest.fixture
def replicas(two_replicas: list[Replica]) -> list[Replica]:
    return two_replicas


@pytest.fixture
def gateway(replicas: list[Replica]) -> Iterator[RunningGateway]:
    with running_gateway(*replicas) as found:
        yield found
        eventually(found.is_idle)
        eventually(lambda: all(replica.is_idle() for replica in replicas))


def streamed(client: openai.OpenAI, **options: Any) -> Iterator[Any]:
    return iter(
        client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **{"max_tokens": 60} | options)
    )


def text_of(chunks: Iterator[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_answers_are_the_replicas_own(gateway: RunningGateway, replicas: list[Replica]) -> None:
    expected = replicas[0].answer(MESSAGES, 20)
    found = gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=20, temperature=0)
    assert found.choices[0].message.content == expected
    assert text_of(streamed(gateway.openai, max_tokens=20, temperature=0)) == expected
    assert [model.id for model in gateway.openai.models.list()] == [NAME]


def test_a_model_is_shown_by_each_of_its_names_with_its_context(replicas: list[Replica]) -> None:
    with running_gateway(*replicas, aliases=["org/default"]) as gateway:
        context = replicas[0].openai.models.retrieve(NAME).max_model_len  # type: ignore[attr-defined]
        shown = [gateway.openai.models.retrieve(name) for name in (NAME, "org/default")]
        assert [card.id for card in shown] == [NAME, "org/default"]
        assert [card.max_model_len for card in (*shown, *gateway.openai.models.list())] == [context] * 3  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError) as unknown:
            gateway.openai.models.retrieve("other")
        assert unknown.value.code == "model_not_found"


def test_what_is_not_there_is_told_to_each_family_of_clients_in_its_own_words(gateway: RunningGateway) -> None:
    def missing(path: str) -> Any:
        with pytest.raises(openai.NotFoundError) as refused:
            gateway.openai.get(f"{gateway.url}{path}", cast_to=object)
        return refused.value.response.json()

    assert missing("/v1/messages/batches")["type"] == "error"
    assert missing("/v1/other")["error"]["code"] == "not_found"


def test_wrong_fields_are_told_in_words(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError, match="n: must be >= 1") as refused:
        gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, n=0)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="model: is required"):
        gateway.openai.post("/chat/completions", body={"messages": MESSAGES}, cast_to=object)


@pytest.mark.parametrize("how", ["engine killed", "drained"])
def test_a_stream_goes_on_elsewhere_when_its_replica_cannot(how: str) -> None:
    with slow_and_fast() as (gateway, slow, fast):
        whole = text_of(streamed(fast.openai, temperature=1, seed=3))
        chunks = streamed(gateway.openai, temperature=1, seed=3, stream_options={"include_usage": True})
        seen = [next(chunks) for _ in range(4)]
        gateway.set_in_use(fast, True)
        slow.kill_engine() if how == "engine killed" else slow.call("POST", "/v1/penstock/drain")
        seen += chunks
        assert text_of(iter(seen)) == whole
        assert len({chunk.id for chunk in seen}) == 1
        usage = seen[-1].usage
        assert usage is not None
        eventually(gateway.is_idle)
        last = gateway.ledger.usages[-1].request_id
        billed = [part.output_tokens for part in gateway.ledger.usages if part.request_id.partition("/")[0] == last]
        assert usage.completion_tokens == sum(billed)  # one that takes over a second is billed in parts


def test_a_stream_whose_replica_drains_stays_there_until_another_is_ready() -> None:
    with slow_and_fast() as (gateway, slow, fast):
        whole = text_of(streamed(fast.openai, temperature=0))
        chunks = streamed(gateway.openai, temperature=0)
        seen = [next(chunks) for _ in range(4)]
        slow.call("POST", "/v1/penstock/drain")
        eventually(gateway.states, lambda states: states == ["draining", "out"])
        seen += [next(chunks) for _ in range(4)]
        gateway.set_in_use(fast, True)
        eventually(slow.is_idle)
        assert text_of(iter([*seen, *chunks])) == whole
        eventually(gateway.is_idle)


def test_a_stream_ends_at_the_only_replica_though_it_drains() -> None:
    with serving(step_s=0.01) as only, running_gateway(only) as gateway:
        whole = text_of(streamed(only.openai, temperature=0))
        chunks = streamed(gateway.openai, temperature=0)
        seen = [next(chunks) for _ in range(2)]
        only.call("POST", "/v1/penstock/drain")
        eventually(gateway.states, lambda states: states == ["draining"])
        assert text_of(iter([*seen, *chunks])) == whole


def test_a_whole_answer_ends_at_the_only_replica_though_that_stops() -> None:
    with serving() as only, running_gateway(only) as gateway, ThreadPoolExecutor(1) as pool:
        with only.engine_paused():
            asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 5, "temperature": 0}
            answer = pool.submit(lambda: gateway.openai.chat.completions.create(**asked))
            eventually(lambda: only.engine.num_open == 1)
            only.loop.call_soon_threadsafe(partial(only.app.drain.begin, is_stopping=True))
            eventually(gateway.states, lambda states: states == ["draining"])
        assert answer.result().choices[0].message.content == only.answer(MESSAGES, 5)
        eventually(gateway.states, lambda states: states == ["out"])  # its reports end when nothing is left


def test_an_alias_is_served_by_the_model_it_stands_for(replicas: list[Replica]) -> None:
    with running_gateway(*replicas, aliases=["default"]) as gateway:
        found = gateway.openai.chat.completions.create(model="default", messages=MESSAGES, max_tokens=5, temperature=0)
        assert found.choices[0].message.content == replicas[0].answer(MESSAGES, 5)
        eventually(lambda: [usage.model for usage in gateway.ledger.usages] == [NAME])


def test_replicas_share_the_work(gateway: RunningGateway, replicas: list[Replica]) -> None:
    """The engines stand still until all requests are placed, so none has left before the last one comes."""
    with ThreadPoolExecutor(6) as pool:
        with engines_paused(replicas):
            texts = [
                pool.submit(lambda: text_of(streamed(gateway.openai, max_tokens=20, temperature=0))) for _ in range(6)
            ]
            placed = eventually(lambda: [each.engine.num_open for each in replicas], lambda found: sum(found) == 6)
        assert all(placed)
        assert len({text.result() for text in texts}) == 1


def test_a_client_that_leaves_is_not_worked_for(gateway: RunningGateway, replicas: list[Replica]) -> None:
    stream = gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=400, stream=True)
    assert any(chunk.choices[0].delta.content for chunk in stream)  # the first event has none
    stream.close()
    eventually(lambda: all(replica.is_idle() for replica in replicas))
    eventually(lambda: bool(gateway.ledger.usages))
    (usage,) = gateway.ledger.usages
    assert usage.input_tokens == len(replicas[0].prompt_ids(MESSAGES))  # counted, not bounded
    assert 1 <= usage.output_tokens < 400


def test_usage_is_what_the_answer_says_streamed_or_not(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("acme")
    client = gateway.client(key)
    told = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=10).usage
    assert told is not None
    text_of(streamed(client, max_tokens=10, seed=1))  # which is told no usage
    eventually(lambda: len(gateway.ledger.usages) == 2)
    assert [(u.tenant_id, u.input_tokens) for u in gateway.ledger.usages] == [("acme", told.prompt_tokens)] * 2
    assert gateway.ledger.usages[0].output_tokens == told.completion_tokens


def test_keys_are_asked_for_once_there_is_a_tenant(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("acme")
    for wrong in ("none", key + "x"):
        with pytest.raises(openai.AuthenticationError):
            gateway.client(wrong).models.list()
    assert gateway.client(key).models.list()


def answer_to_a_head(gateway: RunningGateway, path: str, key: str) -> tuple[int, Any]:
    """Status and body of the answer to the head of a request, whose body is never sent."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", path)
        connection.putheader("authorization", f"Bearer {key}")
        connection.putheader("content-length", "5000000")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_wrong_key_is_answered_before_the_body_comes(gateway: RunningGateway, path: str) -> None:
    gateway.add_tenant("acme")
    status, answer = answer_to_a_head(gateway, path, "wrong")
    assert status == 401
    assert answer["error"]["type"] == "authentication_error"
    assert ("request_id" in answer) == (path == "/v1/messages")  # each family has its own words for it
    rendered = gateway.metrics()
    assert re.search(r'_requests_total\{.*reason="unauthenticated".*\} 1', rendered), rendered


def test_what_a_tenant_may_not_use_does_not_exist_for_it(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme", models=["other-*"]))
    assert not client.models.list().data
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model=NAME, messages=MESSAGES)
    assert refused.value.param == "model"


def test_limits_are_told_with_a_reason_and_a_time(gateway: RunningGateway, replicas: list[Replica]) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"concurrency": 1}))
    with ThreadPoolExecutor(1) as pool, engines_paused(replicas):
        answer = pool.submit(lambda: text_of(streamed(client, max_tokens=10)))
        eventually(lambda: any(replica.engine.num_open for replica in replicas))
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=5)
    assert refused.value.body["reason"] == "concurrency"  # type: ignore[index]
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert answer.result()
    eventually(gateway.is_idle)
    assert client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=5)


def test_tokens_that_were_not_used_come_back(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"tokens_per_minute": 1000}))
    for _ in range(5):  # each reserves most of the limit
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=300, extra_body={"stop_token_ids": list(range(3, 100))}
        )


def test_a_tenants_output_limit_holds_where_the_client_sets_none(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"max_output": 7, "max_input": 4000}))
    found = client.chat.completions.create(model=NAME, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 7
    with pytest.raises(openai.BadRequestError, match="limit is 7"):
        client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match="limit is 4000"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x" * 5000}])


def test_wrong_requests_get_typed_errors_and_change_nothing(gateway: RunningGateway, replicas: list[Replica]) -> None:
    at_gateway = replace(replicas[0], port=gateway.port)
    for body in (b"", b"[]", b"{", b'{"model":5}', b'{"model":"small","max_tokens":"many"}'):
        status, _, answer = at_gateway.call("POST", "/v1/chat/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert at_gateway.call("GET", "/v1/chat/completions")[0] == 405
    assert at_gateway.call("GET", "/nothing")[0] == 404
    status, _, answer = at_gateway.call("POST", "/v1/messages", b"{}")
    assert (status, answer["type"]) == (400, "error")
    # What only a replica can judge, it does.
    status, _, answer = at_gateway.post("/v1/chat/completions", messages=[])
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


def test_no_replica_is_told_with_a_time_to_come_back() -> None:
    with serving() as only, running_gateway(only) as gateway:
        only.call("POST", "/v1/penstock/drain")
        eventually(lambda: all(replica.snapshot.state == "draining" for replica in gateway.app.replicas.values()))
        with pytest.raises(openai.InternalServerError) as refused:
            gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES)
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1


def test_more_than_the_replica_can_hold_waits_its_turn() -> None:
    with serving(max_num_seqs=2, step_s=0.005) as replica, running_gateway(replica) as gateway:
        answers: list[str] = []

        def ask() -> None:
            found = gateway.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=10, temperature=0)
            answers.append(json.dumps(found.choices[0].message.content))

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GIVE_UP_S)
        assert len(answers) == 20
        assert len(set(answers)) == 1
        eventually(gateway.is_idle)
