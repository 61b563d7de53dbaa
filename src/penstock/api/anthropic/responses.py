"""Parts of one answer, and the whole-answer objects of the Messages API, as bytes.

Answers in pieces are `events.py`. Text arrives here ready made: this module has never seen a token id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

encode = msgspec.json.Encoder().encode

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
Block = dict[str, Any]  # of content


class MessageHead(msgspec.Struct, frozen=True):
    id: str
    model: str


class Stop(msgspec.Struct, frozen=True):
    """Reason why an answer ended, and which of the client's stop sequences ended it."""

    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """Anthropic counts the prompt in parts: what was read from the cache is not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, output_tokens: int, cached_tokens: int = 0) -> Usage:
        return cls(prompt_tokens - cached_tokens, 0, cached_tokens, output_tokens)


def text_block(text: str) -> Block:
    return {"type": "text", "text": text}


def thinking_block(text: str, signature: str) -> Block:
    return {"type": "thinking", "thinking": text, "signature": signature}


def tool_use_block(call_id: str, name: str, arguments: str) -> Block:
    return {"type": "tool_use", "id": call_id, "name": name, "input": _input(arguments)}


def _input(arguments: str) -> dict[str, Any]:
    """An object in any case: arguments that are none come under a name that Anthropic proposes for them."""
    if not arguments:
        return {}
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}


def message(head: MessageHead, content: list[Block], stop: Stop, usage: Usage) -> bytes:
    return encode(envelope(head, content, stop, usage))


def token_count(count: int) -> bytes:
    return encode({"input_tokens": count})


def envelope(head: MessageHead, content: list[Block], stop: Stop, usage: Usage) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": stop.stop_reason,
        "stop_sequence": stop.stop_sequence,
        "usage": usage,
    }
