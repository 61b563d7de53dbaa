"""An answer that its client gets as a whole, while the gateway gets it token by token from a penstock replica.

So the gateway knows how far it has come, and another replica can carry it on (`api.relay`). The client sees nothing
until its end: one JSON document, with a status of its own.
"""

from __future__ import annotations

from penstock.http.exchange import Sink, Watcher
from penstock.http.message import render

_EVENTS = b"content-type: text/event-stream"
_OF_STREAMS = (b"content-type:", b"cache-control:", b"x-accel-buffering:")
_JSON = render([(b"content-type", b"application/json")])
_DATA = b"data: "
_ERROR = b'{"error"'


class WholeAnswer:
    """A `Sink`. An answer that is no stream passes as it is."""

    __slots__ = ("_blocks", "_headers", "_sink", "is_started")

    def __init__(self, sink: Sink) -> None:
        self.is_started = False  # the replica's answer
        self._sink = sink
        self._headers: bytes | None = None  # of a relayed answer
        self._blocks: list[bytes] = []

    @property
    def watcher(self) -> Watcher | None:
        return self._sink.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._sink.watcher = watcher

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self.is_started = True
        if status != 200 or _EVENTS not in headers:
            self._sink.start(status, headers, length=length, data=data, is_last=is_last)
            return
        lines = [line for line in headers.splitlines(keepends=True) if not line.startswith(_OF_STREAMS)]
        self._headers = b"".join(lines) + _JSON
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if self._headers is None:
            self._sink.write(data, is_last)
            return
        self._blocks.append(data)
        if is_last:
            end = b"".join(self._blocks)
            body = (b"\n\n" + end).rpartition(b"\n\n" + _DATA)[2].partition(b"\n\n")[0]
            status = 400 if body.startswith(_ERROR) else 200  # only what is the request's own fault is told here
            self._sink.start(status, self._headers, length=len(body), data=body, is_last=True)
