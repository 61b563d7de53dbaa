from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.request import Priority
from penstock.dialects.dialect import Dialect
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.engines.sglang import SGLANG
from penstock.dialects.engines.tgi import TGI
from penstock.dialects.engines.trtllm import TRTLLM
from penstock.dialects.engines.vllm import VLLM
from penstock.dialects.requests import NOTHING, Adapter, RequestOptions, outgoing, priority_of, refuses_priority

ASKED = {"model": "m", "messages": [{"role": "user", "content": 'é "include_usage": true'}], "stream": True}
BODY = json.dumps(ASKED, indent=1).encode()


def sent(dialect: Dialect, options: RequestOptions = NOTHING, **more: Any) -> dict[str, Any]:
    found = json.loads(outgoing(dialect, json.dumps(ASKED | more).encode(), options))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm", "llamacpp", "openai", "penstock"])
def test_where_nothing_differs_the_clients_bytes_go_out(name: str) -> None:
    assert outgoing(DIALECTS[name], BODY) is BODY


def test_the_sign_of_a_priority_is_the_engines() -> None:
    assert [priority_of(VLLM, priority) for priority in Priority] == [-1, 0, 1]  # the lower number sooner
    assert [priority_of(SGLANG, priority) for priority in Priority] == [1, 0, -1]  # the higher number sooner
    assert priority_of(OPENAI, Priority.HIGH) is None
    assert sent(VLLM, RequestOptions(priority=Priority.HIGH))["priority"] == -1
    assert sent(SGLANG, RequestOptions(priority=Priority.HIGH))["priority"] == 1
    assert "priority" not in sent(OPENAI, RequestOptions(priority=Priority.HIGH))


def test_a_normal_request_names_no_priority_for_some_servers_refuse_any() -> None:
    assert outgoing(VLLM, BODY, RequestOptions(priority=Priority.NORMAL)) is BODY


def test_a_server_that_schedules_first_come_first_served_is_understood() -> None:
    said = b'{"error":{"message":"Got priority 1 but priority scheduling is not enabled","code":400}}'
    assert refuses_priority(VLLM, 400, said)
    assert not refuses_priority(VLLM, 400, b'{"error":{"message":"max_tokens is too large"}}')
    assert not refuses_priority(OPENAI, 400, said)


def test_a_tenants_cache_is_its_own_where_the_engine_can_keep_it_apart() -> None:
    assert sent(VLLM, RequestOptions(salt="acme".__add__))["cache_salt"] == "acme"
    assert sent(TRTLLM, RequestOptions(salt="acme".__add__))["cache_salt"] == "acme"
    assert sent(OPENAI, RequestOptions(salt="acme".__add__)) == ASKED


def test_a_stream_is_asked_for_its_usage_and_keeps_its_other_options() -> None:
    options = RequestOptions(usage=True)
    assert sent(VLLM, options)["stream_options"] == {"include_usage": True}
    kept = sent(VLLM, options, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert kept["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert sent(VLLM, options, stream_options=None)["stream_options"] == {"include_usage": True}
    assert "stream_options" not in sent(VLLM, options, stream=False)


def test_tgi_is_told_what_it_knows() -> None:
    found = sent(TGI, max_completion_tokens=5, user="u", temperature=0.5)
    assert found == ASKED | {"model": "tgi", "max_tokens": 5, "temperature": 0.5}


def test_an_adapter_is_selected_as_each_engine_does_it() -> None:
    options = RequestOptions(adapter=Adapter("sql", "/adapters/sql"))
    assert sent(VLLM, options)["model"] == "sql"
    assert sent(TGI, options)["model"] == "sql"
    assert sent(SGLANG, options) == ASKED | {"lora_path": "sql"}
    request = sent(TRTLLM, options)["lora_request"]
    assert (request["lora_name"], request["lora_path"]) == ("sql", "/adapters/sql")
    assert request["lora_int_id"] > 0


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), lambda inner: st.lists(inner), max_leaves=5
)


def names_of_ours(dialect: Dialect) -> set[str]:
    options = {"priority", "cache_salt", "rid", "lora_path", "lora_request", "stream_options"}
    return options | {"model", "max_completion_tokens", "max_tokens", *dialect.renamed, *dialect.renamed.values()}


@given(st.dictionaries(st.text(), values), st.sampled_from(list(DIALECTS.values())))
def test_what_is_not_ours_stays_as_it_was(members: dict[str, Any], dialect: Dialect) -> None:
    others = {name: value for name, value in members.items() if name not in names_of_ours(dialect)}
    options = RequestOptions(Priority.LOW, "salt".__add__, "id", Adapter("a"), usage=True)
    found = json.loads(outgoing(dialect, json.dumps(others).encode(), options))
    for name in others.keys() - set(dialect.dropped):
        assert found[name] == others[name]


@pytest.mark.parametrize(
    "body", [b'{"model":"m","stream":true,"stream_options":7}', b'{"model":"m","\xff":1}', b"[1]", b"{", b"\xff"]
)
def test_what_is_wrong_with_a_request_is_for_the_server_to_say(body: bytes) -> None:
    assert outgoing(DIALECTS["vllm"], body, RequestOptions(usage=True, salt="acme".__add__)).startswith(body[:1])
