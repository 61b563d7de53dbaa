"""The text and the tool calls of an answer, from its bytes: whole or streamed, of each surface that generates text.

It reads the first choice alone. What it cannot read is None, and nothing is said of it: it never raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/messages",
    b"/v1/responses",
)
PATHS = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
MAX_CALLS = 128
_CUT_OFF = ("length", "max_tokens", "max_output_tokens")


class Call(NamedTuple):
    name: str
    arguments: str  # as the model wrote them


class Answer(NamedTuple):
    text: str
    calls: tuple[Call, ...] = ()
    is_cut_off: bool = False  # at its limit of tokens


def read_answer(data: bytes) -> Answer | None:
    """None: it is none that can be read."""
    try:
        reader = _Reader()
        if data.lstrip()[:1] == b"{":
            reader.document(msgspec.json.decode(data))
        else:
            for document in _events(data):
                reader.document(document)
        return reader.answer()
    except (RecursionError, TypeError, ValueError, AttributeError, LookupError):  # msgspec's are ValueErrors
        return None


def _events(data: bytes) -> Iterator[Any]:
    for line in data.splitlines():
        if line.startswith(b"data:"):
            payload = line[5:].strip()
            if payload and payload != b"[DONE]":
                yield msgspec.json.decode(payload)


class _Reader:
    def __init__(self) -> None:
        self._text: list[str] = []
        self._calls: dict[object, list[str]] = {}  # by place: name and pieces of arguments
        self._end = ""
        self._has_any = False

    def answer(self) -> Answer | None:
        if not self._has_any:
            return None
        calls = tuple(Call(found[0], "".join(found[1:])) for found in self._calls.values())
        return Answer("".join(self._text), calls, self._end in _CUT_OFF)

    def document(self, document: dict[str, Any]) -> None:
        if "choices" in document:
            for choice in document["choices"]:
                if not choice.get("index"):
                    self._choice(choice)
        elif isinstance(document.get("content"), list):  # Anthropic's, whole
            self._start_over()
            for place, block in enumerate(document["content"]):
                self._block(place, block)
            self._end = document.get("stop_reason") or ""
        elif isinstance(document.get("output"), list):  # of /v1/responses, whole
            self._response(document)
        else:
            self._event(document)

    def _start_over(self) -> None:
        self._text, self._calls, self._has_any = [], {}, True

    def _choice(self, choice: dict[str, Any]) -> None:
        self._has_any = True
        message = choice.get("message")
        if message is not None:
            self._start_over()
        part = message or choice.get("delta") or {}
        if text := part.get("content") or choice.get("text"):
            self._text.append(str(text))
        for place, call in enumerate(part.get("tool_calls") or ()):
            function = call.get("function") or {}
            self._call(call.get("index", place), function.get("name"), function.get("arguments"))
        self._end = choice.get("finish_reason") or self._end

    def _call(self, place: object, name: str | None, arguments: str | None) -> None:
        if place not in self._calls:
            if len(self._calls) >= MAX_CALLS:
                raise ValueError("so many calls are of no use")
            self._calls[place] = [""]
        found = self._calls[place]
        found[0] = found[0] or (name or "")
        if arguments:
            found.append(arguments)

    def _block(self, place: int, block: dict[str, Any]) -> None:
        if block.get("type") == "text":
            self._text.append(str(block["text"]))
        elif block.get("type") == "tool_use":
            given = block.get("input")
            self._call(place, block.get("name"), msgspec.json.encode(given).decode() if given else "")

    def _event(self, event: dict[str, Any]) -> None:
        """An event of Anthropic's streams, or of those of responses."""
        kind, delta = event.get("type"), event.get("delta")
        if kind == "content_block_start":
            self._has_any = True
            self._block(event["index"], event["content_block"])
        elif kind == "content_block_delta" and isinstance(delta, dict):
            if delta.get("type") == "text_delta":
                self._text.append(str(delta["text"]))
            elif delta.get("type") == "input_json_delta":
                self._call(event["index"], None, delta["partial_json"])
        elif kind == "message_delta" and isinstance(delta, dict):
            self._end = delta.get("stop_reason") or self._end
        elif kind in ("response.completed", "response.incomplete"):
            self._response(event["response"])

    def _response(self, response: dict[str, Any]) -> None:
        self._start_over()
        for place, item in enumerate(response["output"]):
            if item.get("type") == "message":
                self._text += [str(part["text"]) for part in item["content"] if part.get("type") == "output_text"]
            elif item.get("type") == "function_call":
                self._call(place, item["name"], item["arguments"])
        self._end = (response.get("incomplete_details") or {}).get("reason") or ""
