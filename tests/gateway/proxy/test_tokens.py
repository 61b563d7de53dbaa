"""Requests that no engine works for, through the gateway: a tenant's model, a request of its limits, and no tokens."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.prices import Price
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually

CHAT: Any = [{"role": "user", "content": "What is it?"}]
BODIES: Any = {
    "/tokenize": {"prompt": "hello there"},
    "/v1/tokenize": {"messages": CHAT},
    "/detokenize": {"tokens": [3, 4]},
    "/v1/detokenize": {"tokens": [3, 4]},
    "/v1/chat/completions/render": {"messages": CHAT, "stream": True, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": CHAT},
}


@pytest.fixture(scope="module")
def replica(replica_at_hand: Replica) -> Replica:
    return replica_at_hand


@pytest.fixture(scope="module")
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    url = f"http://{replica.host}:{replica.port}"
    pool = ModelSettings(replicas=[url], aliases=["nick"], price=Price(input=2.0, output=3.0))
    with running_gateway(pools={NAME: pool}) as found:
        yield found
        eventually(found.is_idle)


def post(gateway: RunningGateway, key: str, path: str, **body: Any) -> tuple[int, Any]:
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps({"model": NAME} | body), {"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize("path", BODIES)
def test_answers_are_the_replicas_and_no_tokens_are_charged(
    gateway: RunningGateway, replica: Replica, path: str
) -> None:
    key, before = gateway.add_tenant("acme"), len(gateway.ledger.usages)
    assert post(gateway, key, path, **BODIES[path]) == (200, replica.post(path, **BODIES[path])[2])
    eventually(lambda: len(gateway.ledger.usages) > before)
    usage = gateway.ledger.usages[-1]
    assert (usage.tenant_id, usage.requests, usage.input_tokens, usage.output_tokens) == ("acme", 1, 0, 0)
    assert usage.cost_nanos == 0


def test_an_alias_is_known_and_a_model_of_others_is_not(gateway: RunningGateway) -> None:
    assert post(gateway, gateway.add_tenant("one"), "/tokenize", model="nick", prompt="a")[0] == 200
    other = gateway.add_tenant("other", models=["nothing-*"])
    assert post(gateway, other, "/tokenize", prompt="a")[0] == 404
    assert post(gateway, "nobody's", "/tokenize", prompt="a")[0] == 401


def test_a_request_counts_and_its_text_does_not(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("few", limits={"requests_per_minute": 2, "tokens_per_minute": 50, "max_input": 20})
    long = "word " * 100
    assert [post(gateway, key, "/tokenize", prompt=long)[0] for _ in range(3)] == [200, 200, 429]


def test_a_refusal_is_in_the_words_of_its_clients(gateway: RunningGateway) -> None:
    key = gateway.add_tenant("wrong")
    assert post(gateway, key, "/detokenize", tokens=[99999])[1]["error"]["param"] == "tokens"
    _, said = post(gateway, key, "/v1/messages/count_tokens", model="another", messages=CHAT)
    assert (said["type"], said["error"]["type"]) == ("error", "not_found_error")
