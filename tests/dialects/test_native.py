from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from penstock.dialects.dialect import Dialect
from penstock.dialects.engines.tgi import TGI_GENERATE
from penstock.dialects.engines.triton import TRITON, TRITON_TRTLLM
from penstock.dialects.fields import CHAT, COMPLETIONS
from penstock.dialects.native import NativeCall, translate
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from tests.dialects.servers import WORDS, FakeTgi, FakeTriton, FakeTritonTrtllm

FAKES = {"triton": FakeTriton, "triton-trtllm": FakeTritonTrtllm, "tgi-generate": FakeTgi}
NATIVE = [TRITON, TRITON_TRTLLM, TGI_GENERATE]
native = pytest.mark.parametrize("dialect", NATIVE, ids=lambda dialect: dialect.name)


def rendered(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def call(dialect: Dialect, path: bytes = COMPLETIONS, **asked: Any) -> NativeCall:
    assert dialect.native is not None
    body = json.dumps({"model": "m", "prompt": "Hi", **asked}).encode()
    return translate(dialect.native, path, body, request_id="id", created=1, render=rendered)


def answered(dialect: Dialect, asked: NativeCall) -> list[bytes]:
    return FAKES[dialect.name]().answer(asked.target.decode(), json.loads(asked.body))[1]


def events(data: bytes) -> list[Any]:
    lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_requests_are_put_as_each_server_wants_them() -> None:
    asked = call(TRITON, max_tokens=5, temperature=0.5, stop=["a", "b"], stream=True)
    assert asked.target == b"/v2/models/m/generate_stream"
    sent = json.loads(asked.body)
    assert sent["text_input"] == "Hi"
    assert sent["stream"] is True
    assert json.loads(sent["sampling_parameters"]) == {"max_tokens": 5, "temperature": 0.5, "stop": ["a", "b"]}
    asked = call(TRITON_TRTLLM, max_completion_tokens=5, stop="a")
    assert asked.target == b"/v2/models/m/generate"
    assert json.loads(asked.body).items() >= {"text_input": "Hi", "max_tokens": 5, "stop_words": "a"}.items()
    asked = call(TGI_GENERATE, max_tokens=5, seed=3)
    assert asked.target == b"/generate"
    assert json.loads(asked.body)["inputs"] == "Hi"
    assert json.loads(asked.body)["parameters"].items() >= {"max_new_tokens": 5, "seed": 3, "details": True}.items()


@native
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_whole_answer_comes_back_in_openais_words(dialect: Dialect, path: bytes) -> None:
    asked = call(dialect, path, messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    if path == CHAT:
        assert b"<user>Hi<assistant>" in asked.body
    asked.answer.read_head(
        {name.encode(): value.encode() for name, value in FAKES[dialect.name].answer_headers.items()}
    )
    found = json.loads(asked.answer.whole(b"".join(answered(dialect, asked))))
    choice = found["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "".join(WORDS[:3])
    assert choice["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == 7
    assert found["usage"]["completion_tokens"] == 3
    assert found["model"] == "m"


@native
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_comes_back_in_openais_words(dialect: Dialect, path: bytes) -> None:
    asked = call(
        dialect,
        path,
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        max_tokens=50,
        stream_options={"include_usage": True},
    )
    parts = answered(dialect, asked)
    found = events(b"".join([asked.answer.feed(part) for part in parts]) + asked.answer.end())
    texts = [c["delta"].get("content", "") if path == CHAT else c["text"] for e in found for c in e["choices"]]
    assert "".join(texts) == "".join(WORDS)
    assert found[-2]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["usage"]["completion_tokens"] == len(WORDS)
    assert found[-1]["usage"]["prompt_tokens"] == 7


@native
def test_the_books_find_the_usage_though_the_client_did_not_ask(dialect: Dialect) -> None:
    asked = call(dialect, stream=True)
    data = b"".join([asked.answer.feed(part) for part in answered(dialect, asked)]) + asked.answer.end()
    assert find_usage(data) == TokenUsage(7, 5)
    assert all("usage" not in event for event in events(data))


@given(st.sampled_from(NATIVE), st.lists(st.integers(1, 40)))
def test_a_stream_may_be_cut_anywhere(dialect: Dialect, cuts: list[int]) -> None:
    asked, again = call(dialect, stream=True), call(dialect, stream=True)
    data = b"".join(answered(dialect, asked))
    whole = asked.answer.feed(data) + asked.answer.end()
    parts, rest = [], data
    for cut in cuts:
        parts.append(again.answer.feed(rest[:cut]))
        rest = rest[cut:]
    assert b"".join(parts) + again.answer.feed(rest) + again.answer.end() == whole


def test_an_error_in_mid_stream_is_an_error_event_and_no_end() -> None:
    asked = call(TRITON, stream=True)
    data = asked.answer.feed(b'data: {"text_output":"The"}\n\ndata: {"error":"out of memory"}\n\n') + asked.answer.end()
    assert b'"error":{"message":"out of memory"' in data
    assert b"[DONE]" not in data


def test_tokens_that_are_not_for_readers_are_not_shown() -> None:
    asked = call(TGI_GENERATE, stream=True)
    data = asked.answer.feed(b'data:{"token":{"id":2,"text":"</s>","special":true},"details":null}\n\n')
    assert b"</s>" not in data


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error":"no such model"}', b"[]", b"null", b'{"text_output":5}'])
def test_what_is_no_answer_is_the_engines_failure(body: bytes) -> None:
    with pytest.raises(EngineFailed):
        call(TRITON).answer.whole(body)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": [1, 2, 3]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_cannot_be_said_is_refused_and_not_dropped(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        call(TRITON_TRTLLM, **asked)
    assert refused.value.param == param


def test_without_a_chat_template_a_text_server_cannot_chat() -> None:
    assert TRITON.native is not None
    with pytest.raises(UnsupportedParameter, match="chat template"):
        translate(TRITON.native, CHAT, b'{"messages":[]}', request_id="", created=0, render=None)
    with pytest.raises(InvalidRequest):
        translate(TRITON.native, COMPLETIONS, b"{", request_id="", created=0, render=None)
    assert call(TRITON, response_format={"type": "text"}).target
