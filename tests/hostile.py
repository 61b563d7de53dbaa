"""Requests that are small or within every limit, and cost a careless server much: one corpus for the replica's tests,
the gateway's and the drill. What is right for each is up to the server: an answer, or a refusal; never a standstill."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_BODY_BYTES = 8 << 20  # the default of max_body_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class Hostile:
    name: str
    path: str
    build: Callable[[str], bytes]  # from the model's name to the body

    def __str__(self) -> str:
        return self.name


def _body(**fields: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, **fields}, ensure_ascii=False).encode()


def _with(make: Callable[[], dict[str, Any]]) -> Callable[[str], bytes]:
    """Fields that are too many to be made before they are needed."""
    return lambda model: _body(**make())(model)


def _repeated(before: bytes, unit: bytes, after: bytes, size_bytes: int = MAX_BODY_BYTES) -> Callable[[str], bytes]:
    """JSON by hand: `unit` as often as fits, with commas between."""

    def build(model: str) -> bytes:
        head = b'{"model":%b,' % json.dumps(model).encode() + before
        count = (size_bytes - len(head) - len(after)) // (len(unit) + 1)
        return head + b",".join([unit] * count) + after

    return build


def _text(before: bytes, unit: bytes, after: bytes, size_bytes: int = MAX_BODY_BYTES) -> Callable[[str], bytes]:
    def build(model: str) -> bytes:
        head = b'{"model":%b,' % json.dumps(model).encode() + before
        return head + unit * ((size_bytes - len(head) - len(after)) // len(unit)) + after

    return build


_HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
_HELLO_JSON = b'"messages":[{"role":"user","content":"hello"}],"max_tokens":1,'
_STOPS = ["a" * 1000 + chr(98 + index) * 24 for index in range(16)]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _tools(count: int, size: int) -> list[dict[str, Any]]:
    named = [{"name": f"f{index}", "description": "d" * size} for index in range(count)]
    return [{"type": "function", "function": one | {"parameters": {"type": "object"}}} for one in named]


def _schema(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def _results(count: int) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r" * 60}
    user = {"role": "user", "content": [result] * count}
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": [use]}, user]


CORPUS = [
    # -- what multiplies
    Hostile("chat: n x stops x length", CHAT, _body(**_HELLO, n=128, stop=_STOPS)),
    Hostile("completions: n x stops x length", COMPLETIONS, _body(prompt="a", n=128, stop=_STOPS, max_tokens=1)),
    Hostile("completions: prompts x stops", COMPLETIONS, _body(prompt=["a"] * 1024, stop=_STOPS, max_tokens=1)),
    Hostile("messages: stop_sequences", MESSAGES, _body(**_HELLO, stop_sequences=_STOPS)),
    Hostile(
        "chat: n x logit_bias",
        CHAT,
        _with(lambda: _HELLO | {"n": 128, "logit_bias": {str(token): 1.0 for token in range(500)}}),
    ),
    Hostile(
        "chat: logit_bias of 8 MB",
        CHAT,
        _with(lambda: _HELLO | {"n": 128, "logit_bias": {str(token): 1 for token in range(500_000)}}),
    ),
    Hostile("completions: n x prompt", COMPLETIONS, _with(lambda: {"prompt": [1] * 400, "n": 128, "max_tokens": 1})),
    Hostile(
        "completions: n x stop_token_ids", COMPLETIONS, _body(prompt="a", n=128, stop_token_ids=list(range(3, 131)))
    ),
    Hostile("completions: n x echo", COMPLETIONS, _with(lambda: {"prompt": [1] * 400, "n": 128, "echo": True})),
    Hostile("completions: echo and logprobs", COMPLETIONS, _body(prompt="a" * 300, n=128, echo=True, logprobs=20)),
    Hostile("completions: n x logprobs", COMPLETIONS, _body(prompt="a", n=128, logprobs=20, max_tokens=16)),
    Hostile("chat: n x top_logprobs", CHAT, _body(**_HELLO, n=128, logprobs=True, top_logprobs=20)),
    Hostile("completions: n x tokens", COMPLETIONS, _body(prompt="a", n=128, max_tokens=100, ignore_eos=True)),
    Hostile("rerank: documents x query", RERANK, _body(query="q" * 15_000, documents=["d"] * 1000)),
    Hostile("rerank: documents x long query", RERANK, _body(query="q" * 1_000_000, documents=["d"] * 1000)),
    Hostile(
        "rerank: cut documents x query",
        RERANK,
        _body(query="q" * 15_000, documents=["d"] * 1000, truncate_prompt_tokens=-1),
    ),
    Hostile("score: texts x text", SCORE, _body(text_1="q" * 15_000, text_2=["d"] * 1000)),
    Hostile("score: texts x long text", SCORE, _body(text_1="q" * 1_000_000, text_2=["d"] * 1000)),
    Hostile("score: pairs", SCORE, _body(text_1=["q" * 300] * 1000, text_2=["d" * 300] * 1000)),
    Hostile("embeddings: many texts", EMBEDDINGS, _body(input=["a"] * 2048)),
    Hostile("embeddings: many lists of ids", EMBEDDINGS, _body(input=[[1] * 100] * 2048)),
    # -- text
    Hostile("chat: a prompt of 8 MB", CHAT, _text(b'"messages":[{"role":"user","content":"', b"hello ", b'"}]}')),
    Hostile("completions: a prompt of 8 MB", COMPLETIONS, _text(b'"prompt":"', b"hello ", b'"}')),
    Hostile("completions: one word of 8 MB", COMPLETIONS, _text(b'"prompt":"', b"a", b'"}')),
    Hostile(
        "completions: a long prompt cut", COMPLETIONS, _text(b'"truncate_prompt_tokens":8,"prompt":"', b"a b ", b'"}')
    ),
    Hostile("completions: escapes", COMPLETIONS, _text(b'"prompt":"', b"\\u00e9", b'"}')),
    Hostile("completions: surrogates", COMPLETIONS, _text(b'"prompt":"', b"\\ud83d\\ude42", b'"}')),
    Hostile("completions: many prompts", COMPLETIONS, _body(prompt=["hello " * 1000] * 1024, max_tokens=1)),
    Hostile(
        "completions: spaces around",
        COMPLETIONS,
        lambda model: b" " * (MAX_BODY_BYTES - 200) + _body(prompt="a")(model),
    ),
    Hostile("completions: nothing but spaces", COMPLETIONS, lambda _: b" " * MAX_BODY_BYTES),
    Hostile("completions: quotation marks", COMPLETIONS, _text(b'"prompt":"', b'\\",[{:', b'"}')),
    Hostile(
        "messages: 8 MB", MESSAGES, _text(b'"max_tokens":1,"messages":[{"role":"user","content":"', b"a ", b'"}]}')
    ),
    Hostile(
        "count_tokens: 2 MB", COUNT_TOKENS, _text(b'"messages":[{"role":"user","content":"', b"a ", b'"}]}', 2 << 20)
    ),
    Hostile("embeddings: a text of 8 MB", EMBEDDINGS, _text(b'"input":"', b"hello ", b'"}')),
    Hostile("rerank: a document of 8 MB", RERANK, _text(b'"query":"q","documents":["', b"hello ", b'"]}')),
    Hostile("score: a text of 8 MB", SCORE, _text(b'"text_1":"q","text_2":"', b"hello ", b'"}')),
    Hostile("responses: 8 MB", RESPONSES, _text(b'"input":"', b"a ", b'"}')),
    # -- turns and blocks
    Hostile(
        "responses: turns of one role",
        RESPONSES,
        _repeated(b'"input":[', b'{"role":"user","content":"%b"}' % (b"a" * 130), b"]}", 4 << 20),
    ),
    Hostile(
        "responses: calls",
        RESPONSES,
        _repeated(b'"input":[', b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}', b"]}", 1 << 20),
    ),
    Hostile(
        "responses: turns to be dropped",
        RESPONSES,
        _repeated(
            b'"truncation":"auto","max_output_tokens":1,"input":[',
            b'{"role":"user","content":"a"},{"role":"assistant","content":"b"}',
            b"]}",
            1 << 20,
        ),
    ),
    Hostile("chat: turns", CHAT, _repeated(b'"messages":[', b'{"role":"user","content":"ab"}', b"]}")),
    Hostile(
        "chat: parts", CHAT, _repeated(b'"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}")
    ),
    Hostile(
        "messages: turns of one role",
        MESSAGES,
        _repeated(b'"max_tokens":1,"messages":[', b'{"role":"user","content":"%b"}' % (b"a" * 130), b"]}", 4 << 20),
    ),
    Hostile(
        "count_tokens: turns of one role",
        COUNT_TOKENS,
        _repeated(b'"messages":[', b'{"role":"user","content":"%b"}' % (b"a" * 130), b"]}", 4 << 20),
    ),
    Hostile("messages: results of tools", MESSAGES, _with(lambda: {"max_tokens": 1, "messages": _results(20_000)})),
    Hostile(
        "messages: short turns",
        MESSAGES,
        _repeated(b'"max_tokens":1,"messages":[', b'{"role":"user","content":""}', b"]}"),
    ),
    # -- structure
    Hostile("completions: token ids", COMPLETIONS, _repeated(b'"prompt":[', b"1", b"]}")),
    Hostile("completions: lists of ids", COMPLETIONS, _repeated(b'"prompt":[', b"[1]", b"]}")),
    Hostile("embeddings: token ids", EMBEDDINGS, _repeated(b'"input":[', b"1", b"]}")),
    Hostile("embeddings: lists of ids", EMBEDDINGS, _repeated(b'"input":[', b"[1]", b"]}")),
    Hostile("rerank: documents", RERANK, _repeated(b'"query":"q","documents":[', b'"d"', b"]}")),
    Hostile("rerank: document objects", RERANK, _repeated(b'"query":"q","documents":[', b'{"text":"d"}', b"]}")),
    Hostile("score: texts", SCORE, _repeated(b'"text_1":"q","text_2":[', b'"d"', b"]}")),
    Hostile(
        "chat: lists in template arguments",
        CHAT,
        _repeated(_HELLO_JSON + b'"chat_template_kwargs":{"a":[', b"[]", b"]}}"),
    ),
    Hostile(
        "chat: members of metadata",
        CHAT,
        _with(lambda: _HELLO | {"metadata": {f"{number:x}": "" for number in range(400_000)}}),
    ),
    Hostile("chat: nested lists", CHAT, _text(_HELLO_JSON + b'"chat_template_kwargs":{"a":', b"[", b"", 4 << 20)),
    Hostile("chat: nested objects", CHAT, _text(_HELLO_JSON + b'"chat_template_kwargs":{"a":', b'{"a":', b"", 4 << 20)),
    Hostile("chat: not built", CHAT, _repeated(_HELLO_JSON + b'"audio":[', b"[]", b"]}")),
    # -- names and values that errors speak of
    Hostile("completions: an unknown field of 4 MB", COMPLETIONS, _text(b'"', b"a", b'":1}', 4 << 20)),
    Hostile("completions: an unknown field like a path", COMPLETIONS, _text(b'"', b" - at `$", b'":1}', 4 << 20)),
    Hostile(
        "chat: an unknown field of a turn", CHAT, _text(b'"messages":[{"role":"user","', b"conten", b'":1}]}', 4 << 20)
    ),
    Hostile(
        "chat: an unknown role of 4 MB", CHAT, _text(b'"messages":[{"content":"","role":"', b"a`", b'"}]}', 4 << 20)
    ),
    Hostile("chat: a model's name of 8 MB", CHAT, lambda _: _body(**_HELLO)("m" * (MAX_BODY_BYTES - 200))),
    Hostile("embeddings: a model's name of 8 MB", EMBEDDINGS, lambda _: _body(input="a")("m" * (MAX_BODY_BYTES - 200))),
    Hostile("embeddings: an unknown field of 4 MB", EMBEDDINGS, _text(b'"', b"inpu", b'":1}', 4 << 20)),
    Hostile("rerank: an unknown field of 4 MB", RERANK, _text(b'"', b"document", b'":1}', 4 << 20)),
    Hostile("score: an unknown field of 4 MB", SCORE, _text(b'"', b"text_", b'":1}', 4 << 20)),
    Hostile("messages: an unknown field of 4 MB", MESSAGES, _text(b'"', b"max_token", b'":1}', 4 << 20)),
    Hostile("count_tokens: an unknown field of 4 MB", COUNT_TOKENS, _text(b'"', b"message", b'":1}', 4 << 20)),
    Hostile("load adapter: an unknown field", LOAD_ADAPTER, _text(b'"', b"lora_nam", b'":1}', 60 << 10)),
    Hostile("unload adapter: nested", UNLOAD_ADAPTER, _text(b'"lora_name":', b"[", b"", 60 << 10)),
    # -- tools and guides
    Hostile("chat: tools", CHAT, _with(lambda: _HELLO | {"tools": _tools(512, 15_000)})),
    Hostile("chat: tools of the same name", CHAT, _with(lambda: _HELLO | {"tools": [_TOOL] * 512})),
    Hostile("chat: too many tools", CHAT, _with(lambda: _HELLO | {"tools": _tools(20_000, 100)})),
    Hostile(
        "chat: a required tool", CHAT, _with(lambda: _HELLO | {"tools": _tools(512, 10), "tool_choice": "required"})
    ),
    Hostile(
        "chat: a tool's nested schema",
        CHAT,
        _with(
            lambda: _HELLO | {"tools": [{"type": "function", "function": {"name": "f", "parameters": _schema(200)}}]}
        ),
    ),
    Hostile(
        "chat: a tool's schema of 8 MB",
        CHAT,
        _repeated(
            _HELLO_JSON + b'"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":[',
            b'"ab"',
            b"]}}}]}",
        ),
    ),
    Hostile(
        "chat: an answer's schema of 8 MB",
        CHAT,
        _repeated(
            _HELLO_JSON + b'"response_format":{"type":"json_schema","json_schema":{"schema":{"enum":[',
            b'"ab"',
            b"]}}}}",
        ),
    ),
    Hostile("chat: choices of an answer", CHAT, _with(lambda: _HELLO | {"guided_choice": ["c" * 1900] * 4096})),
    Hostile("chat: a regular expression", CHAT, _with(lambda: _HELLO | {"guided_regex": "(a|a)*" * 20_000})),
    Hostile(
        "messages: tools",
        MESSAGES,
        _repeated(
            b'"max_tokens":1,"messages":[{"role":"user","content":"q"}],"tools":[',
            b'{"name":"f","input_schema":{}}',
            b"]}",
        ),
    ),
]
