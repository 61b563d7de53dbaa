"""Answers in pieces: the events of one streamed message, as frames ready to be sent.

A message is one block of text, written in three calls: `start`, `text` as it comes, `end`. A text event goes out for
every token of every stream and costs the encoding of its text and one concatenation.
"""

from __future__ import annotations

from typing import Any

from penstock.api import sse
from penstock.api.anthropic.responses import MessageHead, Stop, Usage, encode, envelope


def start(head: MessageHead, usage: Usage) -> list[bytes]:
    return [
        _event("message_start", message=envelope(head, [], Stop(), usage)),
        _event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        _event("ping"),
    ]


def text(piece: str) -> bytes:
    return _TEXT_BEFORE + encode(piece) + _TEXT_AFTER


def end(stop: Stop, usage: Usage) -> list[bytes]:
    """The counts are of the whole message."""
    return [
        _event("content_block_stop", index=0),
        _event("message_delta", delta=stop, usage=usage),
        _event("message_stop"),
    ]


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(encode({"type": kind, **fields}), kind.encode())


_EMPTY_TEXT = {"type": "text_delta", "text": ""}
_TEXT_BEFORE, _TEXT_AFTER = _event("content_block_delta", index=0, delta=_EMPTY_TEXT).split(b'""')
