"""Requests and response heads as plain data, and how a response is written down. Knows no socket."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from penstock.api.errors import convention_at, error_headers
from penstock.core.errors import PenstockError
from penstock.http.uploads import Upload

Headers = Iterable[tuple[bytes, bytes]]

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CLOSE = b"connection: close\r\n"
UPGRADE = b"upgrade: websocket\r\nconnection: upgrade\r\n"
JSON = b"content-type: application/json\r\n"
EVENT_STREAM = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-accel-buffering: no\r\n"  # nginx would collect the tokens otherwise
)

_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}


class Request:
    """Request of a client, complete. The body is the client's bytes, untouched (joined, where it came in pieces)."""

    __slots__ = ("body", "headers", "method", "path", "target", "upload")

    def __init__(
        self, method: bytes, target: bytes, headers: dict[bytes, bytes], body: bytes, upload: Upload | None = None
    ) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0]
        self.headers = headers  # by lower-case name; of a repeated header the last
        self.body = body
        self.upload = upload  # what took the body piece by piece, in place of `body`

    @property
    def query(self) -> bytes:
        return self.target.partition(b"?")[2]


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """Status and headers that an upstream sends before the body."""

    status: int
    headers: dict[bytes, bytes]  # by lower-case name; of a repeated header the last


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def has_body(status: int) -> bool:
    return status >= 200 and status not in (204, 304)


def render(headers: Headers) -> bytes:
    """Header lines as they go on the wire."""
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)


def by_name(lines: bytes) -> dict[bytes, bytes]:
    """Header lines as `render` makes them, by lower-case name."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return {name.lower(): value for name, _, value in pairs}


def render_error(error: PenstockError, target: bytes = b"") -> tuple[int, bytes, bytes]:
    """Status, header lines and body of the answer to a request for `target` that cannot be served."""
    form, request_id = convention_at(target), uuid.uuid4().hex
    named = [(name, request_id.encode()) for name in form.id_headers]
    return form.status(error), JSON + render([*error_headers(error), *named]), form.body(error, request_id)
