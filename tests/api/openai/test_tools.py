"""Tools in a chat request: what is taken, what it comes to, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from penstock.api.openai import Call, ChatChunks, ChatRequest, Choice, ResponseHead, Usage, chat_completion, parse_chat
from penstock.core.errors import InvalidRequest
from penstock.core.request import FinishReason

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
NAMED = {"type": "function", "function": {"name": "g"}}


def parse(messages: Any = (USER,), **fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": list(messages), **fields}).encode())


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, "index": 0}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("choice", "may", "must", "names"),
    [
        (None, True, False, ["f", "g"]),
        ("auto", True, False, ["f", "g"]),
        ("none", False, False, ["f", "g"]),
        ("required", True, True, ["f", "g"]),
        (NAMED, True, True, ["g"]),
    ],
)
def test_what_may_and_must_be_called(choice: Any, may: bool, must: bool, names: list[str]) -> None:
    chat = parse(tools=TOOLS, tool_choice=choice)
    assert (chat.may_call(), chat.must_call()) == (may, must)
    assert [tool.name for tool in chat.callable_tools()] == names


def test_the_model_is_told_of_all_or_of_none() -> None:
    told = [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]
    assert parse(tools=TOOLS).offered_tools() == told
    assert parse(tools=TOOLS, tool_choice=NAMED).offered_tools() == told  # the prompt stays the same
    assert parse(tools=TOOLS, tool_choice="none").offered_tools() == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": "é"}', {"a": "é"}), ("", {}), ("[1]", [1]), ('{"a": ', '{"a": '), ("[" * 2000, "[" * 2000)],
)
def test_arguments_go_to_the_template_as_json_or_as_they_are(arguments: str, expected: object) -> None:
    (_, message) = parse([USER, called(arguments)]).conversation()
    assert message["content"] == ""
    assert message["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}]


def test_results_go_back_with_the_id_of_their_call() -> None:
    chat = parse(
        [USER, called("{}"), {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]}]
    )
    assert chat.conversation()[-1] == {"role": "tool", "content": "4", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS + TOOLS}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, "tools[0].function.parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [USER, called("{}")], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(**fields)
    assert refused.value.param == param


HEAD = ResponseHead("chatcmpl-1", "m", 1)


def test_a_whole_answer_with_calls_is_what_the_client_expects() -> None:
    calls = [Call("c1", "f", '{"a": 1}')]
    choices = [Choice(0, "", "tool_calls", calls=calls), Choice(1, "So:", FinishReason.LENGTH, calls=calls)]
    first, second = ChatCompletion.model_validate_json(chat_completion(HEAD, choices, Usage.of(1, 2))).choices
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    assert first.message.tool_calls is not None
    assert first.message.tool_calls[0].to_dict() == {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert (second.finish_reason, second.message.content) == ("length", "So:")


def test_chunks_of_a_call_are_what_the_client_expects() -> None:
    chunks = ChatChunks(HEAD)
    begun = ChatCompletionChunk.model_validate_json(chunks.call(1, 0, Call("c1", "f", ""))).choices[0]
    more = ChatCompletionChunk.model_validate_json(chunks.arguments(1, 0, '{"é')).choices[0]
    assert begun.delta.tool_calls is not None
    assert more.delta.tool_calls is not None
    assert begun.delta.tool_calls[0].to_dict() == {
        "index": 0,
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert more.delta.tool_calls[0].to_dict() == {"index": 0, "function": {"arguments": '{"é'}}
    assert (begun.index, begun.finish_reason, more.delta.content) == (1, None, None)
