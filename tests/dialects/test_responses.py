"""Responses of servers that only chat: what they are asked, and what becomes of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.api.responses import ResponsesRequest, parse_responses
from penstock.core.errors import EngineFailed, UnsupportedParameter
from penstock.dialects.responses import ChatAnswer, chat_request

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def request(**body: Any) -> ResponsesRequest:
    return parse_responses(json.dumps({"model": "m", "input": "hello", **body}).encode())


def asked(**body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(chat_request(request(**body), asks_usage=True))
    return found


def read(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition(b"data: ")[2]) for block in stream.split(b"\n\n") if block]


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: %b\n\n" % json.dumps({"id": "x", "choices": choices}).encode()


STREAM = b"".join(
    [
        chunk(role="assistant", content=""),
        chunk(reasoning_content="Hm."),
        chunk(content="Let me "),
        chunk(content="look."),
        chunk(tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]),
        chunk(tool_calls=[{"index": 0, "id": "c1", "function": {"arguments": '{"a":'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": "1}"}}]),
        chunk(tool_calls=[{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]),
        chunk(finish="tool_calls"),
        b"data: %b\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode(),
        b"data: [DONE]\n\n",
    ]
)


def test_a_request_says_what_was_asked_and_nothing_else() -> None:
    assert asked() == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    found = asked(
        instructions="I",
        max_output_tokens=9,
        stream=True,
        tools=[FUNCTION, {"type": "web_search"}],
        tool_choice={"type": "function", "name": "f"},
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        metadata={"k": "v"},
        store=False,
        input=[
            {"role": "user", "content": "hello"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "Yes."},
        ],
    )
    function = {"name": "f", "parameters": FUNCTION["parameters"]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert found == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "I"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "Yes.", "tool_call_id": "c"},
        ],
        "max_completion_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
    }


@pytest.mark.parametrize("body", [{"truncation": "auto"}, {"previous_response_id": "r"}, {"background": True}])
def test_what_a_chat_cannot_say_is_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        asked(**body)
    assert refused.value.param in body


def test_images_are_parts_of_a_chat() -> None:
    image = {"type": "input_image", "image_url": "data:,x", "detail": "low"}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "y"}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    found = asked(input=[{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, image]}, call, output])
    assert found["messages"][0]["content"] == [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:,x", "detail": "low"}},
    ]
    assert found["messages"][2] == {
        "role": "tool",
        "tool_call_id": "c",
        "content": [{"type": "image_url", "image_url": {"url": "y"}}],
    }


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("mark", [b"\n", b"\r\n"])
def test_chunks_become_events_however_they_are_cut(size: int, mark: bytes) -> None:
    stream, answer = STREAM.replace(b"\n", mark), ChatAnswer(request(stream=True))
    found = read(b"".join(answer.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + answer.end())
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    last = found[-1]
    assert last["type"] == "response.completed"
    thoughts, said, *calls = last["response"]["output"]
    assert thoughts["content"][0]["text"] == "Hm."
    assert said["content"][0]["text"] == "Let me look."
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("c1", "f", '{"a":1}'),
        ("c2", "g", "{}"),
    ]
    usage = last["response"]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_is_incomplete(finish: str, reason: str) -> None:
    answer = ChatAnswer(request(stream=True))
    last = read(answer.feed(chunk(content="On")) + answer.feed(chunk(finish=finish)) + answer.end())[-1]
    assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", {"reason": reason})


@pytest.mark.parametrize("broken", [b"", b"data: nonsense\n\n", b'data: {"error":{"message":"no"}}\n\n'])
def test_a_stream_that_breaks_off_fails(broken: bytes) -> None:
    answer = ChatAnswer(request(stream=True))
    found = read(
        answer.feed(chunk(content="On")) + answer.feed(broken) + answer.feed(b"data: [DONE]\n\n") + answer.end()
    )
    assert [event["type"] for event in found].count("response.failed") == 1
    assert (found[-1]["type"], found[-1]["response"]["output"][0]["status"]) == ("response.failed", "incomplete")


def test_a_completion_becomes_a_response() -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2)]
    scores = {"content": [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]}
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": scores}
    found = json.loads(ChatAnswer(request()).whole(json.dumps({"choices": [choice], "usage": USAGE}).encode()))
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call"]
    assert [item["call_id"] for item in found["output"][1:]] == ["c0", "c1"]
    assert found["output"][0]["content"][0]["logprobs"][0]["logprob"] == -0.5
    assert (found["status"], found["usage"]["total_tokens"]) == ("completed", 12)
    for wrong in (b"nonsense", b"{}", b'{"choices":[]}'):
        with pytest.raises(EngineFailed):
            ChatAnswer(request()).whole(wrong)
