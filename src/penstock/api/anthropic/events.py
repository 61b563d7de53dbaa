"""Answers in pieces: the events of one streamed message, as frames ready to be sent.

A message is one block of text, written in three calls: `start`, `text` as it comes, `end`. A text event goes out for
every token of every stream and costs the encoding of its text and one concatenation. An answer that may call tools is
written as `Blocks`, which begin when there is something to put into them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.api import sse
from penstock.api.anthropic.responses import (
    Block,
    MessageHead,
    Stop,
    Usage,
    encode,
    envelope,
    text_block,
    thinking_block,
    tool_use_block,
)


def start(head: MessageHead, usage: Usage) -> list[bytes]:
    begun, ping = start_empty(head, usage)
    return [begun, _event("content_block_start", index=0, content_block=text_block("")), ping]


def start_empty(head: MessageHead, usage: Usage) -> list[bytes]:
    """Events of a message's start, without a block."""
    return [_event("message_start", message=envelope(head, [], Stop(), usage)), _event("ping")]


def text(piece: str) -> bytes:
    return _TEXT_BEFORE + encode(piece) + _TEXT_AFTER


def end(stop: Stop, usage: Usage) -> list[bytes]:
    """The counts are of the whole message."""
    return [_event("content_block_stop", index=0), *end_empty(stop, usage)]


def end_empty(stop: Stop, usage: Usage) -> list[bytes]:
    """Events of a message's end, when no block is open."""
    return [_event("message_delta", delta=stop, usage=usage), _event("message_stop")]


class Blocks:
    """The blocks of a message, one after the other: thoughts, text, and calls of tools."""

    def __init__(self, sign: Callable[[str], str] = lambda thought: "") -> None:
        """`sign`: what proves later that a thought was made here."""
        self._sign = sign
        self._index = -1
        self._open: str | None = None  # its type
        self._thought: list[str] = []  # of the block that is open

    def text(self, piece: str) -> list[bytes]:
        begun: list[bytes] = []
        if self._open != "text":
            begun = self._begin(text_block(""))
            piece = piece.lstrip("\n") if self._index else piece  # a block of its own needs no line of its own
        return [*begun, self._delta({"type": "text_delta", "text": piece})]

    def thought(self, piece: str) -> list[bytes]:
        begun: list[bytes] = []
        if self._open != "thinking":
            begun = self._begin(thinking_block("", ""))
            self._thought = []
        self._thought.append(piece)
        return [*begun, self._delta({"type": "thinking_delta", "thinking": piece})]

    def call(self, call_id: str, name: str) -> list[bytes]:
        return self._begin(tool_use_block(call_id, name, ""))

    def arguments(self, piece: str) -> list[bytes]:
        return [self._delta({"type": "input_json_delta", "partial_json": piece})]

    def close(self) -> list[bytes]:
        if self._open is None:
            return []
        signed = []
        if self._open == "thinking":
            signed = [self._delta({"type": "signature_delta", "signature": self._sign("".join(self._thought))})]
        self._open = None
        return [*signed, _event("content_block_stop", index=self._index)]

    def _begin(self, block: Block) -> list[bytes]:
        closed = self.close()
        self._index += 1
        self._open = block["type"]
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(encode({"type": kind, **fields}), kind.encode())


_EMPTY_TEXT = {"type": "text_delta", "text": ""}
_TEXT_BEFORE, _TEXT_AFTER = _event("content_block_delta", index=0, delta=_EMPTY_TEXT).split(b'""')
