"""Requests of the Responses API, and the chats that they are."""

import json
from typing import Any

import pytest

from penstock.api.responses import ResponsesRequest, parse_responses
from penstock.api.responses.truncation import without_oldest
from penstock.core.errors import InvalidRequest, UnsupportedParameter

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def parse(**body: Any) -> ResponsesRequest:
    return parse_responses(json.dumps({"model": "m", "input": "hello", **body}).encode())


def conversation(**body: Any) -> list[dict[str, Any]]:
    return parse(**body).to_chat().conversation()


def refused(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse(**body)
    return error.value


def test_a_text_is_a_users_message_and_instructions_are_a_system_prompt() -> None:
    assert conversation(instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


def test_items_in_a_row_are_turns() -> None:
    found = conversation(
        instructions="A",
        input=[
            {"role": "developer", "content": "B"},
            {"role": "user", "content": [{"type": "input_text", "text": "C"}]},
            {"role": "user", "content": "D"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "E"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "F"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "G"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "H"}]},
        ],
    )
    assert [turn["role"] for turn in found] == ["system", "user", "assistant", "tool", "tool"]
    assert [turn["content"] for turn in found] == ["A\nB", "C\nD", "F", "G", "H"]
    assert found[2]["reasoning_content"] == "E"
    assert [call["function"]["arguments"] for call in found[2]["tool_calls"]] == [{"x": 1}, {}]
    assert [turn["tool_call_id"] for turn in found[3:]] == ["c1", "c2"]


def test_items_come_back_without_ids_and_with_members_that_nobody_reads() -> None:
    """What Codex sends: openai/codex #12669."""
    said = {"type": "output_text", "text": "I did.", "annotations": [], "logprobs": []}
    found = conversation(
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do."}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "message", "role": "assistant", "content": [said], "phase": "final_answer"},
        ]
    )
    assert found == [{"role": "user", "content": "Do."}, {"role": "assistant", "content": "I did."}]


def test_a_custom_tools_call_is_told_as_a_functions() -> None:
    found = conversation(
        input=[
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."},
        ]
    )
    assert found[0]["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert found[1] == {"role": "tool", "content": "Done.", "tool_call_id": "c"}


def test_tools_that_nobody_here_can_run_are_skipped() -> None:
    others = [{"type": kind, "name": "x"} for kind in ("web_search", "custom", "namespace", "image_generation")]
    request = parse(tools=[*others, FUNCTION], tool_choice="auto")
    assert [tool.definition().name for tool in request.to_chat().tools or ()] == ["f"]
    assert parse(tools=others, tool_choice="auto").to_chat().tools is None


def test_a_choice_among_tools() -> None:
    chat = parse(tools=[FUNCTION], tool_choice={"type": "function", "name": "f"}).to_chat()
    assert chat.must_call()
    other = FUNCTION | {"name": "g"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    chat = parse(tools=[FUNCTION, other], tool_choice=allowed).to_chat()
    assert chat.must_call()
    assert [tool.name for tool in chat.callable_tools()] == ["g"]
    assert refused(tools=[FUNCTION], tool_choice=allowed).param == "tool_choice"
    hosted = refused(tools=[FUNCTION], tool_choice={"type": "web_search"})
    assert isinstance(hosted, UnsupportedParameter)


def test_a_format_of_the_text_is_a_guide() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = parse(text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}).guide()
    assert asked is not None
    assert (asked.guide.kind, json.loads(asked.guide.source), asked.param) == ("json_schema", schema, "text")
    assert parse(text={"format": {"type": "text"}}).guide() is None
    assert refused(text={"format": {"type": "json_schema"}}).param == "text.format.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"service_tier": "flex"}, "service_tier"),
    ],
)
def test_what_is_not_done_is_refused_by_name(body: dict[str, Any], param: str | None) -> None:
    error = refused(**body)
    assert isinstance(error, UnsupportedParameter)
    assert param is None or error.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"inputs": "x"}, "inputs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, None),
    ],
)
def test_what_is_wrong_is_told_by_name(body: dict[str, Any], param: str | None) -> None:
    error = refused(**body)
    assert not isinstance(error, UnsupportedParameter)
    assert param is None or (error.param or "").startswith(param)


def test_what_codex_sends_is_understood() -> None:
    request = parse(
        client_metadata={"x-codex-installation-id": "1"},
        include=["reasoning.encrypted_content"],
        instructions="You are Codex.",
        parallel_tool_calls=False,
        prompt_cache_key="0199",
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        tool_choice="auto",
        tools=[FUNCTION | {"strict": False}, {"type": "web_search", "external_web_access": False}],
    )
    chat = request.to_chat()
    assert (chat.reasoning_effort, chat.parallel_tool_calls, chat.stream) == ("medium", False, True)
    assert not request.has_logprobs


def test_what_the_agents_sdk_sends_is_understood() -> None:
    """Recorded from openai-agents 0.24.0: the second turn of an agent that has called its tool."""
    called = {"arguments": '{"sunny": false}', "call_id": "call_1", "name": "get_weather", "type": "function_call"}
    request = parse(
        include=[],
        instructions="Be brief.",
        input=[
            {"content": "Weather?", "role": "user"},
            called | {"id": "fc_1", "status": "completed"},
            {"call_id": "call_1", "output": "Sunny.", "type": "function_call_output"},
        ],
        parallel_tool_calls=False,
        previous_response_id="resp_1",
        temperature=0.0,
        text={"format": {"type": "json_schema", "name": "final_output", "schema": {"type": "object"}, "strict": True}},
        tools=[FUNCTION | {"strict": True, "description": "The weather."}],
    )
    chat = request.to_chat()
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.parallel_tool_calls is False


def test_the_oldest_turns_are_dropped_until_the_rest_fits() -> None:
    turns = [
        {"role": "user", "content": "1"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "5"},
    ]
    chat = parse(instructions="S", input=turns, truncation="auto").to_chat()

    def contents(most: int) -> list[str] | None:
        found = without_oldest(chat, lambda one: len(one.messages) <= most)
        return None if found is None else [str(message.content) for message in found.messages]

    assert contents(5) == contents(4) == ["S", "3", "4", "5"]
    assert contents(3) == contents(2) == ["S", "5"]
    assert contents(1) is None
