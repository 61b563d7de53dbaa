"""A request of a WebSocket: an exchange inside the process, whose answer becomes messages.

The application answers it as it answers HTTP. A stream of server-sent events is taken apart into its events; any other
answer is told as a whole.
"""

from __future__ import annotations

import re
from typing import Protocol

from penstock.http.exchange import Exchange, NoChannel, Watcher
from penstock.http.message import Request, by_name

Headers = dict[str, str]  # by lower-case name

_EVENTS = "text/event-stream"
_GAP = re.compile(rb"\r?\n\r?\n")
_FRAMING = ("content-type", "content-length", "date", "cache-control", "x-accel-buffering")


class Answer(Protocol):
    """The listener to an answer. One of `whole`, `ended` and `broken` comes last; none after a `cancel`."""

    def started(self, headers: Headers) -> None:
        """The answer is a stream, and has begun."""

    def event(self, name: bytes, data: bytes) -> None: ...
    def comment(self, text: bytes) -> None: ...
    def ended(self) -> None: ...
    def broken(self) -> None:
        """The answer broke off."""

    def whole(self, status: int, headers: Headers, body: bytes) -> None: ...


class Client(Protocol):
    """The socket that it came on."""

    @property
    def peer(self) -> str: ...
    @property
    def is_paused(self) -> bool: ...


class SocketExchange(Exchange):
    __slots__ = ("_answer", "_client", "_has_events", "_head", "_is_over", "_paused", "_rest")

    def __init__(self, request: Request, client: Client, answer: Answer) -> None:
        super().__init__(NoChannel(), request, keep_alive=False, speaks_chunked=False)
        self._client = client
        self._answer: Answer | None = answer  # None: it is over, and nothing holds on to anything
        self._is_over = False
        self._paused: Watcher | None = None  # the one that was told to
        self._has_events = False
        self._head: tuple[int, Headers] | None = None  # of an answer that is told as a whole
        self._rest = b""  # of that, or of an event that is not complete

    @property
    def is_open(self) -> bool:
        return not self._is_over

    @property
    def peer(self) -> str:
        return self._client.peer

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        if self._is_over:
            return
        assert not self.is_started, "an exchange is answered once"
        self.is_started = True
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in by_name(headers).items()}
        self._has_events = status == 200 and found.get("content-type", "").startswith(_EVENTS)
        told = {name: value for name, value in found.items() if name not in _FRAMING}
        if self._has_events:
            assert self._answer is not None
            self._answer.started(told)
        else:
            self._head = (status, told)
        self.write(data, is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if self._is_over:
            return
        self._rest += data
        if self._has_events:
            self._tell_events(is_last)
        if is_last:
            self._end()
        elif self._client.is_paused:
            self.pause()

    def abort(self) -> None:
        answer = self._close()
        if answer is not None:
            answer.broken()

    def close_after(self) -> None: ...

    def pause(self) -> None:
        """The client reads too slowly."""
        if self.watcher is not None and self.watcher is not self._paused:
            self._paused = self.watcher
            self.watcher.pause()

    def resume(self) -> None:
        paused, self._paused = self._paused, None
        if paused is not None and self.watcher is not None:
            self.watcher.resume()

    def cancel(self) -> None:
        """Gives up the work, as if a client had left. Nothing more is told of the answer."""
        watcher = self.watcher
        self._close()
        if watcher is not None:
            watcher.client_gone()

    def _end(self) -> None:
        answer = self._close()
        assert answer is not None
        if self._head is not None:
            answer.whole(*self._head, self._rest)
        else:
            answer.ended()

    def _close(self) -> Answer | None:
        """The listener that is to be told of the end; None: it was told."""
        answer, self._answer = self._answer, None
        self._is_over, self.watcher, self._paused = True, None, None
        return answer

    def _tell_events(self, is_last: bool) -> None:
        answer = self._answer
        assert answer is not None
        *blocks, self._rest = _GAP.split(self._rest)
        if is_last and self._rest:
            blocks.append(self._rest)
        for block in blocks:
            name, lines = b"", []
            for line in block.splitlines():
                field, _, value = line.partition(b":")
                value = value.removeprefix(b" ")
                if not field and value:
                    answer.comment(value)
                elif field == b"event":
                    name = value
                elif field == b"data":
                    lines.append(value)
            if lines:
                answer.event(name, b"\n".join(lines))
