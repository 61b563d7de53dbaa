"""Images in the requests of every API: one kind of part behind the wire, that knows where it came from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.api.anthropic import parse_messages
from penstock.api.openai import ChatRequest, parse_chat
from penstock.api.openai.chat import ImageAsked
from penstock.api.responses import parse_responses
from penstock.core.errors import InvalidRequest

URL = "data:image/png;base64,AAAA"
TEXT = {"type": "text", "text": "what?"}


def chat(*content: Any, role: str = "user") -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": role, "content": content}]}).encode())


def anthropic(*messages: Any, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 1, "messages": messages, **fields}
    return parse_messages(json.dumps(body).encode()).to_chat()


def responses(*items: Any) -> ChatRequest:
    return parse_responses(json.dumps({"model": "m", "input": items}).encode()).to_chat()


def contents(chat: ChatRequest) -> list[Any]:
    return [message["content"] for message in chat.conversation()]


IMAGE = {"type": "image"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
INPUT = {"type": "input_image", "image_url": URL}


def test_both_forms_and_details() -> None:
    found = chat(
        {"type": "image_url", "image_url": URL},
        TEXT,
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    )
    assert contents(found) == [[IMAGE, TEXT, IMAGE]]
    assert found.images() == [
        ImageAsked(URL, False, "messages[0].content[0].image_url"),
        ImageAsked(URL, True, "messages[0].content[2].image_url"),
    ]
    assert contents(chat(TEXT, TEXT)) == ["what?\nwhat?"]
    assert chat(TEXT).images() == []


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "image_url.detail"),
        ({"type": "image_url", "image_url": {"url": URL, "size": 3}}, "image_url.size"),
        ({"type": "image_url", "image_url": URL, "text": "x"}, "text"),
        ({"type": "text", "text": "x", "image_url": URL}, "image_url"),
        ({"type": "image_url", "image_url": 3}, "image_url"),
    ],
    ids=json.dumps,
)
def test_parts_that_are_none(part: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(part)
    assert refused.value.param == f"messages[0].content[0].{param}"


def test_anthropics_blocks() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [BLOCK, TEXT], "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    found = anthropic(
        {"role": "user", "content": [TEXT, BLOCK]},
        {"role": "user", "content": "and"},
        {"role": "user", "content": [url]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [TEXT, result]},
    )
    assert contents(found) == [
        [TEXT, IMAGE, {"type": "text", "text": "and"}, IMAGE],
        "",
        [{"type": "text", "text": "Error: "}, IMAGE, TEXT],
        "what?",
    ]
    assert [(image.url, image.path) for image in found.images()] == [
        (URL, "messages[0].content[1].source"),
        ("https://a.example/b.png", "messages[2].content[0].source"),
        (URL, "messages[4].content[1].content[0].source"),
    ]


def test_texts_of_several_messages_keep_their_lines_beside_images() -> None:
    found = anthropic({"role": "user", "content": [BLOCK, TEXT]}, {"role": "user", "content": "and"})
    assert contents(found) == [[IMAGE, TEXT, {"type": "text", "text": "\nand"}]]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "assistant", "content": [BLOCK]}, {"role": "user", "content": "hi"}]},
        {"messages": [{"role": "user", "content": "hi"}], "system": [BLOCK]},
        {"messages": [{"role": "user", "content": [TEXT | {"source": BLOCK["source"]}]}]},
    ],
)
def test_blocks_of_others_than_users(fields: Any) -> None:
    with pytest.raises(InvalidRequest):
        anthropic(*fields.pop("messages"), **fields)


def test_items_of_responses() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [INPUT | {"detail": "low"}]}
    found = responses(
        {"role": "user", "content": [{"type": "input_text", "text": "what?"}, INPUT]},
        {"role": "user", "content": "and"},
        call,
        output,
    )
    assert contents(found) == [[TEXT, IMAGE, {"type": "text", "text": "and"}], "", [IMAGE]]
    assert found.images() == [
        ImageAsked(URL, False, "input[0].content[1].image_url"),
        ImageAsked(URL, True, "input[3].output[0].image_url"),
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].file_id"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url"),
        ({"role": "assistant", "content": [INPUT]}, "input[0].content"),
        ({"role": "system", "content": [INPUT]}, "input[0].content"),
        ({"type": "reasoning", "content": [INPUT]}, "input[0].content"),
    ],
    ids=json.dumps,
)
def test_items_that_show_none(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        responses(item)
    assert refused.value.param == param
