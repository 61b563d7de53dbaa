"""Fields of clients' requests that servers of other kinds are sent, and those that they never are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import message_create_params as anthropic_messages
from openai.types import completion_create_params as openai_completions
from openai.types import embedding_create_params as openai_embeddings
from openai.types.chat import completion_create_params as openai_chat

from penstock.core.errors import InvalidRequest, ThreadUnsupported, UnsupportedParameter
from penstock.dialects.dialect import Dialect, names_in
from penstock.dialects.engines import DIALECTS
from penstock.dialects.engines.openai import OPENAI
from penstock.dialects.engines.sglang import SGLANG
from penstock.dialects.engines.tgi import TGI
from penstock.dialects.engines.vllm import VLLM
from penstock.dialects.fields import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, RERANK, SCORE
from penstock.dialects.requests import NOTHING, RequestOptions, prepare

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)

# What costs the operator more than a price per token says, leads to another model, or names what other tenants have
# under the operator's account. Nobody's ordinary use.
NOT_FORWARDED = {
    "container",
    "diagnostics",
    "fallbacks",
    "fallback_credit_token",
    "inference_geo",
    "mcp_servers",
    "thread",
    "user_profile_id",
    "workspace_id",
}
VALUES = {"service_tier": "auto", "speed": "standard"}


def sent(
    dialect: Dialect, path: bytes, body: dict[str, Any] | bytes, *forward: str, options: RequestOptions = NOTHING
) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return json.loads(prepare(dialect, path, content, options, frozenset(forward)).body)


def fields_of(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__}


STANDARD = {
    CHAT: fields_of(openai_chat.CompletionCreateParamsBase, openai_chat.CompletionCreateParamsStreaming),
    COMPLETIONS: fields_of(
        openai_completions.CompletionCreateParamsBase, openai_completions.CompletionCreateParamsStreaming
    ),
    EMBEDDINGS: fields_of(openai_embeddings.EmbeddingCreateParams),
    MESSAGES: fields_of(anthropic_messages.MessageCreateParamsBase, anthropic_messages.MessageCreateParamsStreaming)
    | {"temperature", "top_p", "top_k"},
    RERANK: {"model", "query", "documents", "top_n", "return_documents", "max_tokens_per_doc"},
    SCORE: {"model", "text_1", "text_2"},
}


@every_dialect
@pytest.mark.parametrize("path", STANDARD, ids=bytes.decode)
def test_every_field_of_the_sdks_is_forwarded(dialect: Dialect, path: bytes) -> None:
    fields = STANDARD[path] - NOT_FORWARDED - {"max_tokens"}
    nothing = {name: values[0] for name, values in dialect.lacks.get(path, {}).items() if values}
    fields -= dialect.lacks.get(path, {}).keys() - nothing.keys()
    asked = {name: nothing.get(name, VALUES.get(name, 1)) for name in fields}
    found = sent(dialect, path, asked)
    assert fields - set(dialect.dropped) - set(dialect.renamed) <= found.keys()


def test_what_tgi_would_ignore_is_refused_by_its_name() -> None:
    assert sent(TGI, CHAT, {"n": 1, "top_k": -1, "min_p": None, "seed": 5})["seed"] == 5
    for path, name, value in ((CHAT, "n", 2), (CHAT, "repetition_penalty", 1.2), (COMPLETIONS, "logprobs", 1)):
        with pytest.raises(UnsupportedParameter) as refused:
            sent(TGI, path, {name: value})
        assert refused.value.param == name
    assert sent(TGI, COMPLETIONS, {"repetition_penalty": 1.2})


def test_tgi_is_sent_a_list_of_stop_strings() -> None:
    for stop in (" a", [" a"]):
        assert sent(TGI, CHAT, {"stop": stop})["stop"] == [" a"]


FOR_OPERATORS = names_in(
    "lora_path lora_request priority chat_template kv_transfer_params bootstrap_host bootstrap_port bootstrap_room "
    "custom_logit_processor logits_processors id_slot n_predict rid request_id extra_key session_params vllm_xargs "
    "mm_processor_kwargs prompt_embeds disaggregated_params routed_dp_rank models Stream max_new_tokens"
)


@every_dialect
def test_what_is_for_the_operator_is_refused_by_its_name(dialect: Dialect) -> None:
    for path in STANDARD:
        for name in FOR_OPERATORS:
            with pytest.raises(UnsupportedParameter) as refused:
                sent(dialect, path, {"model": "m", name: {"lora_path": "/etc"}})
            assert refused.value.param == name
            assert sent(dialect, path, {"model": "m", name: None}).keys() == {"model"}  # asks for nothing
            assert name in sent(dialect, path, {"model": "m", name: 1}, name)  # the operator allows it


def test_a_long_name_is_repeated_in_part() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        sent(OPENAI, CHAT, {"x" * 5000: 1})
    assert len(refused.value.message) < 300


def test_a_template_has_variables_and_no_arguments() -> None:
    assert sent(VLLM, CHAT, {"chat_template_kwargs": {"enable_thinking": False}})
    for kwargs in ({"chat_template": "{{ 1 }}"}, {"tokenize": False}, 7):
        with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
            sent(VLLM, CHAT, {"chat_template_kwargs": kwargs})
    with pytest.raises(UnsupportedParameter):
        sent(TGI, CHAT, {"chat_template_kwargs": {}})


@pytest.mark.parametrize(
    "body", [b'{"service_tier":"priority"}', b'{"service_tier":"prior\\u0069ty"}', b'{"speed":"fast"}']
)
def test_a_faster_lane_that_costs_more_is_not_a_clients_to_choose(body: bytes) -> None:
    with pytest.raises(UnsupportedParameter):
        sent(OPENAI, MESSAGES, body)


@every_dialect
def test_a_server_is_sent_one_output_limit_and_it_is_the_one_that_was_reserved(dialect: Dialect) -> None:
    asked = b'{"model":"m","max_tokens":100000,"max_completion_tokens":9,"max_completion_tokens":5}'
    found = sent(dialect, CHAT, asked)
    assert [found[name] for name in ("max_tokens", "max_completion_tokens") if name in found] == [5]
    assert sent(dialect, CHAT, {"max_tokens": 7, "max_completion_tokens": None})["max_tokens"] == 7
    with pytest.raises(UnsupportedParameter):
        sent(dialect, COMPLETIONS, {"max_completion_tokens": 1, "max_tokens": 100000})


def test_what_is_spelt_twice_is_sent_once() -> None:
    body = b'{"model":"m","user":"a","us\\u0065r":"b"}'
    assert prepare(OPENAI, CHAT, body, NOTHING, frozenset()).body == b'{"model":"m","user":"b"}'


def test_tgi_holds_to_the_limit_that_was_reserved() -> None:
    assert sent(TGI, CHAT, {"max_tokens": 100000, "max_completion_tokens": 5})["max_tokens"] == 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES], ids=bytes.decode)
def test_a_salt_is_the_gateways_with_the_clients_own_in_it(path: bytes) -> None:
    options = RequestOptions(salt=lambda own: f"gateway:{own}")
    assert sent(SGLANG, path, {"model": "m"}, options=options)["cache_salt"] == "gateway:"
    assert sent(SGLANG, path, {"model": "m", "cache_salt": "x"}, options=options)["cache_salt"] == "gateway:x"
    allowed = sent(SGLANG, path, {"model": "m", "cache_salt": "x"}, "cache_salt", options=options)
    assert allowed["cache_salt"] == "gateway:x"  # and no operator can let a client's through as it is
    for salt in (7, {"a": 1}, "x" * 1025):
        with pytest.raises(InvalidRequest, match="cache_salt"):
            sent(SGLANG, path, {"model": "m", "cache_salt": salt}, options=options)
    with pytest.raises(UnsupportedParameter):
        sent(TGI, path, {"model": "m", "cache_salt": "x"}, options=options)


def test_a_thread_is_refused_with_the_code_after_which_its_client_goes_on_without() -> None:
    body = b'{"model": "m", "messages": [], "max_tokens": 1, "thread": {"type": "create"}}'
    with pytest.raises(ThreadUnsupported):
        prepare(VLLM, MESSAGES, body, forward_fields=())
