"""What one answer is made of, and the whole-answer objects of the Messages API, as bytes.

Answers in pieces are `events.py`. Text arrives here ready made: this module has never seen a token id.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

encode = msgspec.json.Encoder().encode

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class MessageHead(msgspec.Struct, frozen=True):
    id: str
    model: str


class Stop(msgspec.Struct, frozen=True):
    """Why an answer ended, and which of the client's stop sequences ended it."""

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


def message(head: MessageHead, text: str, stop: Stop, usage: Usage) -> bytes:
    return encode(envelope(head, [{"type": "text", "text": text}], stop, usage))


def token_count(count: int) -> bytes:
    return encode({"input_tokens": count})


def envelope(head: MessageHead, content: list[dict[str, str]], stop: Stop, usage: Usage) -> dict[str, Any]:
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
