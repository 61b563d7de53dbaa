"""Requests that are held because no replica of their model takes work: a stream's client is told how long, in comments.

A comment is a line of an event stream that clients skip. The first one is preceded by the answer's head, so whatever
comes after it is an event too: `CommentedStream` makes one of an error that would have been an answer of its own. A
request that waits for a moment only gets its answer as if it had not waited.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.admission.admission import Admission
from penstock.api import sse
from penstock.api.errors import Convention
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.http.clock import Timer, TimerClock
from penstock.http.exchange import Sink, Watcher
from penstock.http.message import EVENT_STREAM

FIRST_COMMENT_S = 1.0
COMMENT_EVERY_S = 5.0
_EVENTS = b"content-type: text/event-stream"


class CommentedStream:
    """A `Sink` for an answer to a client that has the head of an event stream already."""

    __slots__ = ("_body", "_convention", "_has_events", "_is_error", "_sink", "is_started")

    def __init__(self, sink: Sink, convention: Convention, headers: bytes) -> None:
        """`headers`: those that the gateway adds."""
        self.is_started = False  # the answer; comments do not count
        self._sink = sink
        self._convention = convention
        self._has_events = self._is_error = False
        self._body = b""
        sink.start(200, EVENT_STREAM + headers)

    @property
    def watcher(self) -> Watcher | None:
        return self._sink.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._sink.watcher = watcher

    def comment(self, text: str) -> None:
        self._sink.write(b": %b\n\n" % text.encode())

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self.is_started = True
        self._is_error = status != 200
        self._has_events = status == 200 and _EVENTS in headers
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if self._has_events:
            self._sink.write(data, is_last)
            return
        self._body += data
        if is_last:  # JSON has line breaks only where they mean nothing
            body = self._body.replace(b"\r", b" ").replace(b"\n", b" ")
            self._sink.write(sse.event(body, self._convention.event_name if self._is_error else None), is_last=True)


@dataclass(frozen=True)
class HoldingServices:
    admission: Admission
    clock: TimerClock
    recorder: GatewayRecorder


class HeldRequest:
    """One request's hold, from when it begins to wait until `end`."""

    __slots__ = ("_headers", "_model", "_routed", "_services", "_since", "_timer", "sink")

    def __init__(
        self, services: HoldingServices, routed: RoutedRequest, model: str, sink: Sink, headers: Callable[[], bytes]
    ) -> None:
        """`model`: the pool it waits for. `headers`: of the answer, that the gateway adds."""
        self.sink = sink  # to write its answer to
        self._services = services
        self._routed = routed
        self._model = model
        self._headers = headers
        self._since = services.clock.now()
        self._timer: Timer | None = None
        if routed.view.stream:
            self._timer = services.clock.call_later(FIRST_COMMENT_S, self._comment)

    def end(self, *, is_admitted: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if is_admitted:
            services = self._services
            services.recorder.was_held(self._model, services.clock.now() - self._since)

    def _comment(self) -> None:
        if not isinstance(self.sink, CommentedStream):
            self.sink = CommentedStream(self.sink, self._routed.surface.convention, self._headers())
        self.sink.comment(self._text())
        self._timer = self._services.clock.call_later(COMMENT_EVERY_S, self._comment)

    def _text(self) -> str:
        admission, now = self._services.admission, self._services.clock.now()
        if admission.has_active(self._model, now):
            return "waiting in line"
        eta_s = admission.eta_s(self._model, now, self._since)
        if eta_s is None:
            return "waiting for a replica"
        return f"waiting for a replica, ready {f'in about {math.ceil(eta_s)} s' if eta_s >= 1.0 else 'soon'}"
