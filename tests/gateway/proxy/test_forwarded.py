"""Clients' requests as servers of other kinds get them: nothing that is the operator's, or another tenant's."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.core.hashing import cache_namespace
from tests.dialects.servers import FAKES, FakeServer, FakeSglang, FakeTgi, FakeTrtllm, FakeVllm
from tests.gateway.other_servers import FakeOpenai, in_front_of
from tests.gateway.running import RunningGateway
from tests.waiting import GIVE_UP_S

QUESTION: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def vllm() -> Iterator[FakeServer]:
    with FakeVllm() as found:
        yield found


@pytest.fixture(scope="module")
def gateway(vllm: FakeServer) -> Iterator[RunningGateway]:
    with in_front_of(vllm) as found:
        yield found


def ask(gateway: RunningGateway, key: str, **more: Any) -> None:
    gateway.client(key).chat.completions.create(**QUESTION, extra_body=more)


@pytest.mark.parametrize("kind", [*FAKES, FakeOpenai], ids=lambda kind: kind.dialect)
def test_a_field_that_is_the_operators_is_refused_and_reaches_no_server(kind: type[FakeServer]) -> None:
    with kind() as server, in_front_of(server) as gateway:
        key = gateway.add_tenant("acme")
        client = gateway.client(key)
        for name in ("lora_path", "lora_request", "priority", "kv_transfer_params", "bootstrap_host", "id_slot"):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model="m", prompt="Hi", extra_body={name: {"lora_path": "/etc"}})
            assert refused.value.param == name
        assert not server.asked
        assert not gateway.ledger.usages  # nobody worked for it
        counted = 'requests_total{model="m",surface="completions",outcome="refused",reason="unsupported_parameter"} 6'
        assert counted in gateway.metrics()
        assert client.completions.create(model="m", prompt="Hi", seed=1, user="me").choices


def test_messages_are_refused_as_their_clients_expect_it(gateway: RunningGateway) -> None:
    body = json.dumps(QUESTION | {"kv_transfer_params": {"remote_host": "x"}})
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/messages", body, {"x-api-key": gateway.add_tenant("acme")})
        answer = connection.getresponse()
        told = json.loads(answer.read())
    assert answer.status == 400
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert told["error"]["message"].startswith("kv_transfer_params")


def test_an_operator_may_forward_more(vllm: FakeServer) -> None:
    with in_front_of(vllm, forward_fields=["priority", "vllm_xargs"]) as gateway:
        ask(gateway, gateway.add_tenant("acme"), priority=0, vllm_xargs={"a": 1})
        assert vllm.asked[-1][1]["vllm_xargs"] == {"a": 1}
        with pytest.raises(openai.BadRequestError):
            ask(gateway, gateway.add_tenant("acme"), lora_path="/etc")


@pytest.mark.parametrize("kind", [FakeVllm, FakeSglang, FakeTrtllm], ids=lambda kind: kind.dialect)
@pytest.mark.parametrize("probe_every_s", [None, 0.0], ids=["probed", "not probed"])
def test_each_tenants_cache_is_its_own_in_every_engine_that_can_keep_it_so(
    kind: type[FakeServer], probe_every_s: float | None
) -> None:
    with kind() as server, in_front_of(server, probe_every_s=probe_every_s) as gateway:
        ask(gateway, "none")  # before there are tenants
        keys = [gateway.add_tenant("one"), gateway.add_tenant("two"), gateway.add_tenant("shares", cache="shared")]
        for key in keys:
            ask(gateway, key)
        salts = [asked["cache_salt"] for _, asked, _ in server.asked]
        assert all(salts)
        assert salts[0] == salts[3]
        assert len(set(salts)) == 3
        for salt in ("one", salts[1], cache_namespace("one", ""), f"?{salts[1]}"):
            ask(gateway, keys[1], cache_salt=salt)
            assert server.asked[-1][1]["cache_salt"] not in salts  # its own, with its own salt in it
        of = next(iter(gateway.app.replicas.values())).salts.namespace_of
        assert [of(salt) for salt in salts] == ["", "3:one", "3:two", ""]


def test_the_output_limit_holds_however_many_are_named() -> None:
    with FakeTgi() as server, in_front_of(server) as gateway:
        key = gateway.add_tenant("acme", limits={"max_output": 5})
        client = gateway.client(key)
        answer = client.chat.completions.create(**QUESTION | {"max_tokens": 100_000}, max_completion_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        assert server.asked[-1][1]["max_tokens"] == 3
        client.completions.create(model="m", prompt="Hi")  # the gateway's own limit is the only one there is
        client.chat.completions.create(model="m", messages=QUESTION["messages"])
        assert [asked["max_tokens"] for _, asked, _ in server.asked[1:]] == [5, 5]


def test_streams_of_a_server_that_refuses_stream_options_go_without_and_are_charged() -> None:
    with FakeOpenai() as server, in_front_of(server, stream_usage=False) as gateway:
        list(gateway.openai.chat.completions.create(**QUESTION, stream=True))
        assert "stream_options" not in server.asked[-1][1]
        gateway.until(lambda: len(gateway.ledger.usages) == 1)
        assert gateway.ledger.usages[0].output_tokens >= 3
