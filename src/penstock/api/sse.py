"""Server-sent events: how pieces of JSON travel in one streamed response. Pure framing; it sends nothing."""

from __future__ import annotations

from penstock.api.errors import OPENAI, Convention
from penstock.core.errors import PenstockError

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: bytes | None = None) -> bytes:
    """One event. JSON never holds a raw newline, so its bytes are always one `data:` line."""
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name, data)


def error_event(error: PenstockError, request_id: str = "", convention: Convention = OPENAI) -> bytes:
    """An error once the status line is gone.

    OpenAI's clients raise on an event that has an `error`, Anthropic's on one that is named so.
    """
    return event(convention.body(error, request_id), convention.event_name)
