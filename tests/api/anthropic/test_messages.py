"""Message requests: what is read, what it becomes, and what is refused with the name of the field."""

import contextlib
import itertools
import json
from typing import Any, get_type_hints

import pytest
from anthropic.types import (
    TextBlock,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.text_block_param import TextBlockParam
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.anthropic import CountTokensRequest, MessagesRequest, parse_count_tokens, parse_messages
from penstock.api.anthropic.blocks import ContentBlock
from penstock.api.anthropic.tools import Tool
from penstock.core.errors import InvalidRequest, UnsupportedParameter

USER = {"role": "user", "content": "hi"}


def parse(messages: Any = (USER,), **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}
    return parse_messages(json.dumps(body).encode())


def turns(messages: Any, **fields: Any) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in parse(messages, **fields).to_chat().conversation()]


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def blocks(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# -- what it becomes


def test_settings_reach_the_chat_request_under_its_names() -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "stream": True, "seed": 7, "cache_salt": "a"}
    chat = parse(stop_sequences=["a", "b"], priority="low", metadata={"user_id": "u1"}, **settings).to_chat()
    assert (chat.model, chat.max_tokens, chat.stop, chat.priority) == ("m", 5, ["a", "b"], "low")
    assert {name: getattr(chat, name) for name in settings} == settings
    assert chat.to_sampling(100, fallback_seed=1).top_k == 40


def test_content_is_text_or_blocks_of_text() -> None:
    assert turns([USER, assistant(blocks("one", "two")), USER])[1] == ("assistant", "one\ntwo")


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", blocks("Be brief.", "Be kind.")])
def test_the_system_prompt_is_the_first_turn(system: Any) -> None:
    assert turns([USER], system=system) == [("system", "Be brief.\nBe kind."), ("user", "hi")]


@pytest.mark.parametrize("system", ["", [], None])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert turns([USER], system=system) == [("user", "hi")]


def test_a_system_message_stays_where_it_stands() -> None:
    found = turns([USER, assistant("yes?"), {"role": "system", "content": "Now in French."}, USER])
    assert [role for role, _ in found] == ["user", "assistant", "system", "user"]


def test_turns_of_one_role_in_a_row_are_one_turn() -> None:
    assert turns([USER, USER, assistant("a"), USER]) == [("user", "hi\nhi"), ("assistant", "a"), ("user", "hi")]


def test_a_last_turn_of_the_assistants_is_continued() -> None:
    chat = parse([USER, assistant("The answer is (")]).to_chat()
    assert chat.continue_final_message
    assert not chat.opens_answer()
    assert parse([USER]).to_chat().opens_answer()


def test_an_empty_last_turn_of_the_assistants_begins_nothing() -> None:
    chat = parse([USER, assistant("")]).to_chat()
    assert chat.opens_answer()
    assert [message.role for message in chat.messages] == ["user"]


def test_an_answer_can_be_sent_back_as_the_client_received_it() -> None:
    answer = TextBlock(type="text", text="hello", citations=None).model_dump() | {"parsed_output": None}
    assert turns([USER, assistant([answer]), USER])[1] == ("assistant", "hello")


def test_an_answer_goes_back_with_what_was_thought() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    (_, answer, _) = parse([USER, assistant([thought, hidden, *blocks("yes")]), USER]).to_chat().messages
    assert (answer.content, answer.reasoning_content) == ("yes", "hm")
    with pytest.raises(InvalidRequest, match="belong to the assistant"):
        parse([{"role": "user", "content": [thought]}])


def test_cache_hints_are_taken_and_change_nothing() -> None:
    hint = {"type": "ephemeral", "ttl": "1h"}
    hinted = [{"type": "text", "text": "hi", "cache_control": hint}]
    assert turns([{"role": "user", "content": hinted}], system=hinted, cache_control=hint)[1] == ("user", "hi")


# -- what is refused


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {}, "title": "x"},
        {"type": "hologram"},
    ],
)
def test_a_block_that_is_not_text_is_unsupported_for_its_type(block: Any) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse([{"role": "user", "content": [*blocks("look"), block]}])
    assert refused.value.param == "messages[0].content[1].type"


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "priority"},
        {"container": "c1"},
        {"mcp_servers": [{"url": "x"}]},
    ],
)
def test_what_is_not_built_is_unsupported_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse(**fields)
    assert refused.value.param == next(iter(fields))


def test_how_hard_a_model_is_to_try_is_its_effort_of_reasoning() -> None:
    assert parse(output_config={"effort": "high"}).to_chat().reasoning_effort == "high"
    assert parse().to_chat().reasoning_effort is None


def test_thinking_is_asked_for_with_a_budget_that_leaves_room_for_the_answer() -> None:
    asked = parse(thinking={"type": "enabled", "budget_tokens": 4}).to_chat().reasoning_asked()
    assert (asked.is_on, asked.budget, asked.is_shown) == (True, 4, True)
    asked = parse(thinking={"type": "adaptive", "display": "omitted"}).to_chat().reasoning_asked()
    assert (asked.is_on, asked.budget, asked.is_shown) == (None, None, False)
    assert parse(thinking={"type": "disabled"}).to_chat().reasoning_asked().is_on is False
    with pytest.raises(InvalidRequest, match="max_tokens") as refused:
        parse(thinking={"type": "enabled", "budget_tokens": 5})
    assert refused.value.param == "thinking"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": {"type": "none"}},
        {"thinking": {"type": "disabled"}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"output_config": {}},
        {"speed": "standard"},
    ],
)
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields).max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, assistant("trailing ")]}, "messages"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"n": 2}, "n"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert refused.value.param == param


def test_max_tokens_is_required() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens: is required"):
        parse_messages(json.dumps({"model": "m", "messages": [USER]}).encode())


def test_counting_takes_the_prompt_and_nothing_else() -> None:
    def parse_count(**fields: Any) -> CountTokensRequest:
        return parse_count_tokens(json.dumps({"model": "m", "messages": [USER], **fields}).encode())

    assert parse_count(system="x").to_chat().conversation()[0]["role"] == "system"
    assert parse_count(tools=[{"name": "f", "input_schema": {}}]).to_chat().offered_tools()
    with pytest.raises(InvalidRequest, match="unknown field 'max_tokens'"):
        parse_count(max_tokens=5)


# -- against the client's own list of fields

_HEADERS = {"user_profile_id", "workspace_id"}  # the client sends these as headers


@pytest.mark.parametrize(
    ("params", "struct"),
    [
        (message_create_params.MessageCreateParamsStreaming, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
        (TextBlockParam, ContentBlock),
        (ToolUseBlockParam, ContentBlock),
        (ToolResultBlockParam, ContentBlock),
        (ToolParam, Tool),
    ],
)
def test_every_field_of_the_client_is_known(params: type, struct: Any) -> None:
    assert set(get_type_hints(params)) - _HEADERS <= set(struct.__struct_fields__)


# -- whatever arrives

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
contents = st.text(max_size=5) | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}))
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": contents}), min_size=1
)


@given(st.dictionaries(st.sampled_from(MessagesRequest.__struct_fields__), anything), messages)
def test_a_request_is_refused_or_becomes_a_chat(fields: dict[str, Any], conversation: list[Any]) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": conversation} | fields
    with contextlib.suppress(InvalidRequest):
        chat = parse_messages(json.dumps(body).encode()).to_chat()
        roles = [message.role for message in chat.messages]
        assert all(one != other for one, other in itertools.pairwise(roles))
        assert bool(chat.continue_final_message) == (roles[-1] == "assistant")
