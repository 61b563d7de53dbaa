"""Sinks that answers are written to, and the two shapes that answers have: whole, or a stream of server-sent events.

A sink knows its protocol and nothing of what is written; `asgi.AsgiSink` is HTTP's. It is awaited, for coroutines that
make an answer piece by piece; `http.exchange.Sink` has the same verbs for callbacks that pass bytes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

from penstock.api import sse
from penstock.core.errors import PenstockError, RequestAborted

Headers = Iterable[tuple[bytes, bytes]]


class Sink(Protocol):
    """One answer: started once, then written to until a piece is the last. Each call waits while the client reads too
    slowly, and raises RequestAborted when the client has gone."""

    is_started: bool  # the status can no longer change

    async def start(self, status: int, headers: Headers = ()) -> None: ...

    async def write(self, data: bytes, is_last: bool = False) -> None: ...


async def respond(sink: Sink, status: int, body: bytes, headers: Headers = ()) -> None:
    await sink.start(status, headers)
    await sink.write(body, is_last=True)


async def json_response(sink: Sink, status: int, body: bytes, headers: Headers = ()) -> None:
    length = (b"content-length", b"%d" % len(body))
    await respond(sink, status, body, [(b"content-type", b"application/json"), length, *headers])


class SseStream:
    """One streamed response: `async with SseStream(sink) as stream: await stream.write(...)`.

    Leaving the block ends the stream; leaving it with an error first tells the client, in an event of its own, since
    the status line is long gone. The error goes on to the router.
    """

    _FIXED = (
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would collect the tokens otherwise
    )

    def __init__(
        self, sink: Sink, error_event: Callable[[PenstockError], bytes] = sse.error_event, headers: Headers = ()
    ) -> None:
        self._sink = sink
        self._error_event = error_event
        self._headers = headers

    async def __aenter__(self) -> Sink:
        await self._sink.start(200, (*self._FIXED, *self._headers))
        return self._sink

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # cancelled: nobody is waiting for more
        with contextlib.suppress(RequestAborted):
            if error is not None:
                shown = error if isinstance(error, PenstockError) else PenstockError("internal error")
                await self._sink.write(self._error_event(shown))
            await self._sink.write(b"", is_last=True)
