"""Text and tool calls of answers, whole and streamed, of every surface; and of bytes that are no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.rollouts.answers import MAX_CALLS, Answer, Call, read_answer

LOOK = Call("look", '{"a": 1}')


def whole(document: Any) -> bytes:
    return json.dumps(document).encode()


def events(*documents: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in documents)


def delta(index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def called(arguments: str, name: str | None = None) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, "function": {"name": name, "arguments": arguments}}])


CALL = {"function": {"name": "look", "arguments": '{"a": 1}'}}
CHAT = {"choices": [{"index": 0, "message": {"content": "hi", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}]}
RESPONSE = {
    "output": [
        {"type": "message", "content": [{"type": "output_text", "text": "hi"}]},
        {"type": "function_call", "name": "look", "arguments": '{"a": 1}'},
    ]
}
MESSAGE = {
    "content": [{"type": "text", "text": "hi"}, {"type": "tool_use", "name": "look", "input": {"a": 1}}],
    "stop_reason": "tool_use",
}


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (whole({"choices": [{"text": "hi", "finish_reason": "length"}]}), Answer("hi", (), True)),
        (whole(CHAT), Answer("hi", (LOOK,))),
        (whole(RESPONSE), Answer("hi", (LOOK,))),
        (whole(MESSAGE), Answer("hi", (Call("look", '{"a":1}'),))),
        (events(delta(content=""), delta(content="h"), delta(content="i", finish="stop")), Answer("hi")),
        (events(delta(content="hi"), delta(1, content="other")), Answer("hi")),
        (events(called("", "look"), called('{"a"'), called(": 1}")), Answer("", (LOOK,))),
        (b": [0,[7]]\n\n" + events({}, CHAT) + b": cost 1 2\n\n", Answer("hi", (LOOK,))),  # relayed, and wanted whole
        (events({"type": "response.completed", "response": RESPONSE}), Answer("hi", (LOOK,))),
        (
            events(
                {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
                {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "look"}},
                {
                    "type": "content_block_delta",
                    "index": 1,
                    "delta": {"type": "input_json_delta", "partial_json": '{"a": 1}'},
                },
                {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}},
            ),
            Answer("hi", (LOOK,), True),
        ),
    ],
)
def test_text_and_calls_are_read(data: bytes, answer: Answer) -> None:
    assert read_answer(data) == answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"data: {",
        b"\xff\xfe",
        whole([]),
        whole({"choices": 3}),
        whole({"choices": [{"index": 0, "message": {"tool_calls": [3]}}]}),
        whole({"content": [{"type": "text"}]}),
        whole({"error": {"message": "no"}}),
        b"[" * 100_000,
        b'{"choices":' * 50_000,
        events(*(delta(tool_calls=[{"index": n, "function": {"name": "x"}}]) for n in range(MAX_CALLS + 1))),
    ],
)
def test_what_is_no_answer_is_none(data: bytes) -> None:
    assert read_answer(data) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "index", "message", "delta", "content", "tool_calls", "function", "output", "type", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(_JSON, max_size=3))
def test_no_document_makes_it_fail(documents: list[Any]) -> None:
    for data in (events(*documents), *map(whole, documents)):
        found = read_answer(data)
        assert found is None or isinstance(found.text, str)
