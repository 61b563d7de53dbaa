"""Server-sent events: how pieces of JSON travel in one streamed response. Pure framing; it sends nothing."""

from __future__ import annotations

from penstock.api.errors import error_body
from penstock.core.errors import PenstockError

DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event. JSON never holds a raw newline, so its bytes are always one `data:` line."""
    return b"data: %b\n\n" % data


def error_event(error: PenstockError) -> bytes:
    """An error once the status line is gone: OpenAI's clients raise on an event that has an `error`."""
    return event(error_body(error))
