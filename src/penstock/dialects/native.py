"""Servers that do not speak OpenAI: a request becomes theirs, and what they answer OpenAI's again.

The tables (`Native`) say which member goes where; this module says what is the same for all: one prompt of text, one
choice, and an end. What cannot be said in such a dialect is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.api.openai.chunks import ChatChunks, CompletionChunks
from penstock.api.openai.responses import Choice, ResponseHead, Usage, chat_completion, text_completion
from penstock.api.sse import DONE, error_event, event
from penstock.core.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from penstock.core.request import FinishReason
from penstock.dialects.dialect import Names, Native
from penstock.dialects.fields import CHAT

Render = Callable[[list[dict[str, Any]]], str]  # a conversation as one prompt

_LENGTHS = ("length", "max_tokens", "max_length")
_DEFAULT_TOKENS = 16  # of /v1/completions
_IMPOSSIBLE = (
    "tools",
    "functions",
    "response_format",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "suffix",
)
_MEANS_NOTHING: dict[str, tuple[object, ...]] = {"response_format": ({"type": "text"},)}


class NativeCall(NamedTuple):
    target: bytes
    body: bytes
    is_stream: bool
    answer: NativeAnswer


def translate(
    native: Native, path: bytes, body: bytes, *, request_id: str, created: int, render: Render | None
) -> NativeCall:
    """Raises what a client may be told. `render`: without one, the server cannot chat."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    _check(asked)
    is_chat, is_stream = path == CHAT, bool(asked.get("stream"))
    prompt = _chat_prompt(asked, render) if is_chat else _prompt(asked.get("prompt"))
    sent: dict[str, Any] = {native.prompt: prompt}
    inner = sent
    for key in native.parameters:
        inner = inner.setdefault(key, {})
    inner |= native.constants
    if not is_chat:
        asked.setdefault("max_tokens", _DEFAULT_TOKENS)
    chosen = {
        other: _stops(native, asked[name]) if name == "stop" else asked[name]
        for name, other in native.renamed.items()
        if asked.get(name) is not None
    }
    inner |= chosen if native.packed is None else {native.packed: msgspec.json.encode(chosen).decode()}
    if native.stream_member is not None:
        inner[native.stream_member] = is_stream
    model = str(asked.get("model", ""))
    target = (native.stream if is_stream else native.whole).replace("{model}", model)
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    options = asked.get("stream_options")
    answer = NativeAnswer(
        native,
        ResponseHead(request_id, model, created),
        is_chat=is_chat,
        has_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        limit=limit if isinstance(limit, int) else None,
    )
    return NativeCall(target.encode(), msgspec.json.encode(sent), is_stream, answer)


class NativeAnswer:
    """One answer on its way back: `whole`, or `feed` for every read and `end`. Events may be cut anywhere."""

    def __init__(
        self, native: Native, head: ResponseHead, *, is_chat: bool, has_usage: bool, limit: int | None
    ) -> None:
        self._native = native
        self._head = head
        self._is_chat = is_chat
        self._has_usage = has_usage
        self._limit = limit
        self._chunks = (ChatChunks if is_chat else CompletionChunks)(head, include_usage=has_usage)
        self._rest = b""
        self._has_begun = self._has_failed = False
        self._num_events = 0
        self._prompt_tokens = self._output_tokens = 0
        self._finish: object = None

    def read_head(self, headers: Mapping[bytes, bytes]) -> None:
        name = self._native.prompt_tokens_header
        if name is not None and (said := headers.get(name, b"")).isdigit():
            self._prompt_tokens = int(said)

    def whole(self, body: bytes) -> bytes:
        """Raises `EngineFailed` if this is not an answer."""
        found = _decoded(body)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        text = _at(found, self._native.text)
        if not isinstance(text, str):
            raise EngineFailed(_error_of(found) or "the replica's answer has no text")
        self._look(found)
        choice = Choice(0, text, self._reason())
        return (chat_completion if self._is_chat else text_completion)(self._head, [choice], self._usage())

    def feed(self, data: bytes) -> bytes:
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return b"".join([self._event(each) for each in events if each.startswith(b"data:")])

    def end(self) -> bytes:
        last = self.feed(b"\n\n") if self._rest else b""
        if self._has_failed:
            return last
        parts = [self._start(), last, event(self._chunks.finish(0, self._reason()))]
        if self._has_usage:
            parts.append(event(self._chunks.usage(self._usage())))
        else:
            parts.append(b': {"usage":%b}\n\n' % msgspec.json.encode(self._usage()))  # for who keeps books
        return b"".join([*parts, DONE])

    def _event(self, data: bytes) -> bytes:
        found = _decoded(data[len(b"data:") :])
        text = _at(found, self._native.delta)
        if not isinstance(text, str):
            if (message := _error_of(found)) is None or self._has_failed:
                return b""
            self._has_failed = True
            return error_event(EngineFailed(message))
        self._num_events += 1
        self._look(found)
        if not text or (self._native.hidden is not None and _at(found, self._native.hidden) is True):
            return self._start()
        return self._start() + event(self._chunks.text(0, text))

    def _start(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        start = self._chunks.start(0)
        return event(start) if start is not None else b""

    def _look(self, found: object) -> None:
        """Counts of one stream are those of its events, so they add up; the prompt's is said again and again."""
        native = self._native
        self._prompt_tokens = max(self._prompt_tokens, _count(_at(found, native.prompt_tokens)))
        self._output_tokens += _count(_at(found, native.output_tokens))
        reason = _at(found, native.finish)
        if isinstance(reason, str) and reason not in ("", "None", "null"):
            self._finish = reason

    def _usage(self) -> Usage:
        return Usage.of(self._prompt_tokens, self._output_tokens or self._num_events)

    def _reason(self) -> FinishReason:
        if self._finish is not None:
            return FinishReason.LENGTH if self._finish in _LENGTHS else FinishReason.STOP
        is_full = self._limit is not None and (self._output_tokens or self._num_events) >= self._limit
        return FinishReason.LENGTH if is_full else FinishReason.STOP


def _check(asked: dict[str, Any]) -> None:
    for name in _IMPOSSIBLE:
        if asked.get(name) and asked[name] not in _MEANS_NOTHING.get(name, ()):
            raise UnsupportedParameter(f"{name} is not possible with this model's server", param=name)
    if (asked.get("n") or 1) != 1:
        raise UnsupportedParameter("this model's server makes one choice for each request", param="n")


def _chat_prompt(asked: dict[str, Any], render: Render | None) -> str:
    if render is None:
        raise UnsupportedParameter(
            "this model's server takes text only and its chat template is not known; use /v1/completions",
            param="messages",
        )
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages is required", param="messages")
    return render(messages)


def _prompt(prompt: object) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UnsupportedParameter("this model's server takes one prompt, as text", param="prompt")
    return prompt


def _stops(native: Native, stops: object) -> object:
    words = [stops] if isinstance(stops, str) else stops
    if not native.stops_joined:
        return words
    if not isinstance(words, list) or len(words) > 1:
        raise UnsupportedParameter("this model's server takes one stop string", param="stop")
    return words[0] if words else ""


def _decoded(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _at(found: object, path: Names | None) -> object:
    if path is None:
        return None
    for key in path:
        if not isinstance(found, dict):
            return None
        found = found.get(key)
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _error_of(found: object) -> str | None:
    message = found.get("error") if isinstance(found, dict) else None
    return str(message) if message else None
