"""Tools in a message request, as the chat that it becomes; and calls in an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message

from penstock.api.anthropic import MessageHead, Stop, Usage, message, parse_messages
from penstock.api.anthropic.responses import text_block, tool_use_block
from penstock.api.openai import ChatRequest
from penstock.core.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object"}, "strict": True, "type": "custom"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}, "caller": {"type": "direct"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}


def parse(messages: Any = (USER,), **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages), **fields}
    return parse_messages(json.dumps(body).encode()).to_chat()


@pytest.mark.parametrize(
    ("choice", "may", "must", "parallel"),
    [
        (None, True, False, None),
        ({"type": "auto"}, True, False, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, False, False),
        ({"type": "any"}, True, True, None),
        ({"type": "tool", "name": "f"}, True, True, None),
        ({"type": "none"}, False, False, None),
    ],
)
def test_choices_mean_what_openais_mean(choice: Any, may: bool, must: bool, parallel: bool | None) -> None:
    chat = parse(tools=[TOOL], tool_choice=choice)
    assert (chat.may_call(), chat.must_call(), chat.parallel_tool_calls) == (may, must, parallel)
    (tool,) = chat.callable_tools()
    assert (tool.name, tool.description, tool.parameters, tool.strict) == ("f", "does", {"type": "object"}, True)


def test_calls_and_results_become_turns_of_a_chat() -> None:
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True}
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USE, USE | {"id": "t2"}]},
        {"role": "user", "content": [RESULT, failed, {"type": "text", "text": "So?"}]},
    ]
    user, assistant, first, second, last = parse(turns).conversation()
    assert (user["content"], assistant["content"], last) == ("hi", "Let me see.", {"role": "user", "content": "So?"})
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": "é"}}
    assert first == {"role": "tool", "content": "4", "tool_call_id": "t1"}
    assert second == {"role": "tool", "content": "Error: no", "tool_call_id": "t2"}
    assert parse([*turns[:2], {"role": "user", "content": [RESULT]}]).opens_answer()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "assistant", "content": [USE]}]}, "messages"),
        (
            {"messages": [USER, {"role": "assistant", "content": [USE]}, {"role": "assistant", "content": "x"}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t"}]}]}, "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [RESULT | {"text": "x"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [RESULT]}]}]},
            "messages[0].content[0].content",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert refused.value.param == param


def test_a_whole_message_with_calls_is_what_the_client_expects() -> None:
    blocks = [text_block("So:"), tool_use_block("t1", "f", '{"a": 1}'), tool_use_block("t2", "f", '{"a": ')]
    found = Message.model_validate_json(message(MessageHead("msg_1", "m"), blocks, Stop("tool_use"), Usage.of(1, 2)))
    assert found.stop_reason == "tool_use"
    text, good, bad = found.content
    assert text.type == "text"
    assert good.type == bad.type == "tool_use"
    assert (good.id, good.name, good.input) == ("t1", "f", {"a": 1})
    assert bad.input == {"INVALID_JSON": '{"a": '}
