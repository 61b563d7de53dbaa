"""Responses of servers that only chat: the request becomes a chat completion, and what they answer a response again.

Other servers that have /v1/responses are asked to chat too: their events differ, and clients are promised ours.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

from penstock.api import openai
from penstock.api.openai import ScoredToken
from penstock.api.responses import ResponseEvents, ResponseHead, ResponsesRequest, Usage
from penstock.api.responses.objects import Incomplete
from penstock.core.errors import EngineFailed, PenstockError, UnsupportedParameter

_encode = msgspec.json.encode
_SAME = (
    *("model", "temperature", "top_p", "logprobs", "top_logprobs", "stream", "parallel_tool_calls"),
    *("reasoning_effort", "user", "safety_identifier", "prompt_cache_key", "seed", "stop", "top_k", "min_p"),
    "repetition_penalty",
    *("min_tokens", "ignore_eos", "cache_salt", "priority", "watermark", "chat_template_kwargs"),
)


def chat_request(request: ResponsesRequest, *, asks_usage: bool) -> bytes:
    """The body of a chat completion. Raises UnsupportedParameter for what no chat can say. `asks_usage`: of a stream.

    Thoughts of earlier turns are left out: some servers refuse a conversation that has them.
    """
    for name in ("previous_response_id", "background", "store"):
        if getattr(request, name):
            raise UnsupportedParameter(f"{name}: no responses are kept here", param=name)
    if request.drops_turns:
        problem = "truncation: the context of this model's servers is not known here; only 'disabled' can be had"
        raise UnsupportedParameter(problem, param="truncation")
    chat = request.to_chat()
    members: dict[str, Any] = {name: value for name in _SAME if (value := getattr(chat, name)) is not None}
    members["messages"] = [_message(message) for message in chat.messages]
    if request.max_output_tokens is not None:
        members["max_completion_tokens"] = request.max_output_tokens
    if chat.tools:
        members["tools"] = [{"type": "function", "function": _given(tool.definition())} for tool in chat.tools]
        if chat.tool_choice is not None:
            choice = chat.tool_choice
            members["tool_choice"] = (
                choice if isinstance(choice, str) else _given(choice) | {"function": choice.function}
            )
    else:
        members.pop("parallel_tool_calls", None)
    if request.format.type == "json_object":
        members["response_format"] = {"type": "json_object"}
    elif request.format.type == "json_schema":
        asked = request.format
        schema = {"name": asked.name or "response", "schema": asked.schema}
        members["response_format"] = {
            "type": "json_schema",
            "json_schema": schema | ({} if asked.strict is None else {"strict": asked.strict}),
        }
    if request.stream and asks_usage:
        members["stream_options"] = {"include_usage": True}
    return _encode(members)


def _message(message: openai.Message) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        return {
            "role": message.role,
            "content": [part.to_wire() for part in content],
            **({} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}),
        }
    found: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        calls = [{"id": call.id, "type": "function", "function": _given(call.function)} for call in message.tool_calls]
        found |= {"content": message.content or None, "tool_calls": calls}
    return found if message.tool_call_id is None else found | {"tool_call_id": message.tool_call_id}


def _given(value: Any) -> dict[str, Any]:
    """The members of a struct that are set."""
    return {name: one for name, one in msgspec.structs.asdict(value).items() if one is not None}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Token(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None
    top_logprobs: list[_Token] = []

    def scored(self) -> ScoredToken:
        raw = self.token.encode(errors="replace") if self.bytes is None else bytearray(self.bytes)
        return ScoredToken(self.token, b"" + raw, self.logprob, [other.scored() for other in self.top_logprobs])


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Said(msgspec.Struct):
    """A message, or a part of one."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None

    def told(self) -> Usage:
        cached = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None
        thoughts = self.completion_tokens_details.reasoning_tokens if self.completion_tokens_details else None
        return Usage.of(self.prompt_tokens, self.completion_tokens or 0, cached or 0, thoughts or 0)


class _Answer(msgspec.Struct):
    """A chat completion, or a chunk of one."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


class ChatAnswer:
    """One answer on its way back: `whole`, or `feed` for every read and `end`. Events may be cut anywhere."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._events = ResponseEvents(ResponseHead(uuid4().hex, int(time.time())), request)
        self._rest = b""
        self._usage: Usage | None = None
        self._finish: str | None = None
        self._call: int | None = None  # the index of the call that is being written
        self._has_begun = self._is_over = False

    def feed(self, data: bytes) -> bytes:
        blocks = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._rest = blocks.pop()
        return b"".join(event for block in blocks for event in self._read(block))

    def end(self) -> bytes:
        """The last events, after all was fed."""
        found = [event for block in (self._rest,) if block for event in self._read(block)]
        self._rest = b""
        if self._is_over:
            return b"".join(found)
        if self._finish is None:
            found += self._failure(EngineFailed("the model's server ended its answer before its time"))
        else:
            found += self._opening()
            found += self._finished()
        return b"".join(found)

    def whole(self, body: bytes) -> bytes:
        """Raises EngineFailed where this is no answer."""
        try:
            answer = _decode(body)
            (choice, *_) = answer.choices
        except (ValueError, RecursionError):
            raise EngineFailed("the model's server answered with something else than a chat completion") from None
        self._usage = answer.usage.told() if answer.usage is not None else None
        self._finish = choice.finish_reason or "stop"
        if choice.message is not None:
            for number, call in enumerate(choice.message.tool_calls or ()):
                call.index = number
            self._say(choice.message, choice.logprobs)
        self._finished()
        return self._events.whole

    def _read(self, block: bytes) -> list[bytes]:
        data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if not data or data == b"[DONE]" or self._is_over:
            return []
        try:
            chunk = _decode(data)
        except (ValueError, RecursionError):
            return self._failure(EngineFailed("the model's server sent an event that is no chunk of a chat"))
        if chunk.error is not None:
            told = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
            return self._failure(EngineFailed(f"the model's server failed: {str(told)[:1000]}"))
        if chunk.usage is not None:
            self._usage = chunk.usage.told()
        found = self._opening()
        for choice in chunk.choices[:1]:
            if choice.delta is not None:
                found += self._say(choice.delta, choice.logprobs)
            self._finish = choice.finish_reason or self._finish
        return found

    def _say(self, said: _Said, logprobs: _Logprobs | None) -> list[bytes]:
        events, found = self._events, list[bytes]()
        if thoughts := said.reasoning_content or said.reasoning:
            found += events.reasoning(thoughts)
        if text := said.content or said.refusal:
            scores = [token.scored() for token in (logprobs.content if logprobs is not None else None) or ()]
            found += events.text(text, scores)
        for call in said.tool_calls or ():
            if call.index != self._call and call.id is not None:  # some servers repeat the id with every part
                name = call.function.name if call.function is not None else None
                found += events.call(call.id, name or "")
                self._call = call.index
            if call.function is not None and call.function.arguments and self._call is not None:
                found += events.arguments(call.function.arguments)
        return found

    def _opening(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return self._events.opening()

    def _finished(self) -> list[bytes]:
        reasons: dict[str, Incomplete] = {"length": "max_output_tokens", "content_filter": "content_filter"}
        return self._events.finish(self._usage, incomplete=reasons.get(self._finish or ""))

    def _failure(self, error: PenstockError) -> list[bytes]:
        self._is_over = True
        return [*self._opening(), *self._events.fail(error, self._usage)]
