"""One request and its answer, as an application sees them.

An exchange is answered once, whole or as a stream. It frames what it is given; the content is the caller's affair.
Every call is harmless once the client has gone, and does nothing.
"""

from __future__ import annotations

from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.http import message
from penstock.http.message import LAST_CHUNK, Request

NOBODY = "0.0.0.0"


class Watcher(Protocol):
    """Watcher of how the client fares. Called from the event loop, never from inside a call to the exchange, but that
    `pause` may come from inside `start` and `write`."""

    def client_gone(self) -> None:
        """The client went away, or was dropped, before its answer was complete. Nothing comes after."""

    def pause(self) -> None:
        """The client reads too slowly: more than the limit is unsent. Write no more than what is in hand."""

    def resume(self) -> None: ...


class Sink(Protocol):
    """Target of an answer: started once, then written to until a piece is the last. An exchange is one."""

    is_started: bool  # the status can no longer change
    watcher: Watcher | None

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None: ...

    def write(self, data: bytes, is_last: bool = False) -> None: ...


class Link(Protocol):
    """A connection that has changed protocols, for what speaks on it now."""

    @property
    def peer(self) -> str: ...
    @property
    def now(self) -> float:
        """The time at the last sweep."""

    @property
    def unsent_bytes(self) -> int: ...
    def send(self, data: bytes) -> None: ...
    def hold_reading(self, is_held: bool) -> None: ...
    def reserve(self, owner: str, num_bytes: int) -> bool:
        """Takes room for a message that is arriving, as for a body. False: there is none."""

    def release(self, owner: str, num_bytes: int) -> None: ...
    def close(self) -> None:
        """Sends what is unsent, and closes."""

    def linger(self) -> None:
        """Closes this side: what the client still sends is thrown away, so that it can read what it was sent last."""

    def drop(self) -> None: ...


class Upgraded(Protocol):
    """A protocol that a connection has changed to. Called from the event loop, and no more after `lost`."""

    def opened(self, link: Link) -> None: ...
    def received(self, data: bytes) -> None: ...
    def pause(self) -> None:
        """The client reads too slowly: more than the limit is unsent."""

    def resume(self) -> None: ...
    def sweep(self, now: float) -> None:
        """Deadlines are looked at."""

    def drain(self) -> None:
        """The server stops: end as soon as nothing is owed to the client."""

    def lost(self) -> None: ...


class Channel(Protocol):
    """The connection's side of an exchange."""

    @property
    def peer(self) -> str: ...
    def send(self, data: bytes) -> None: ...
    def answered(self, close: bool) -> None: ...
    def drop(self) -> None: ...
    def switch(self, head: bytes, protocol: Upgraded) -> None: ...


class NoChannel:
    """The connection's side of an exchange inside the process, which has none of its own."""

    peer = NOBODY

    def __init__(self, peer: str = NOBODY) -> None:
        self.peer = peer

    def send(self, data: bytes) -> None: ...
    def answered(self, close: bool) -> None: ...
    def drop(self) -> None: ...
    def switch(self, head: bytes, protocol: Upgraded) -> None: ...


class Exchange:
    __slots__ = (
        "_channel",
        "_is_bodyless",
        "_is_chunked",
        "_keep_alive",
        "_speaks_chunked",
        "can_upgrade",
        "is_started",
        "page_headers",
        "request",
        "watcher",
    )

    def __init__(self, channel: Channel, request: Request, keep_alive: bool, speaks_chunked: bool) -> None:
        self.request = request
        self.watcher: Watcher | None = None
        self.is_started = False  # something was said; the status can no longer change
        self.page_headers = b""  # lines that let a web page of another origin read the answer
        self.can_upgrade = False  # its client asks for a WebSocket, and this connection can become one
        self._channel: Channel | None = channel
        self._keep_alive = keep_alive
        self._speaks_chunked = speaks_chunked
        self._is_chunked = False
        self._is_bodyless = False

    @property
    def is_open(self) -> bool:
        """There is a client, and it has not got all of its answer."""
        return self._channel is not None

    @property
    def peer(self) -> str:
        """The client's address. One that has gone has an address that is nobody's, and so is trusted with nothing."""
        return self._channel.peer if self._channel is not None else NOBODY

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        """The whole answer. `headers` are lines as `message.render` makes them; length and framing are added here."""
        self.start(status, headers, length=len(body), data=body, is_last=True)

    def refuse(self, error: PenstockError) -> None:
        self.respond(*message.render_error(error, self.request.target))

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        """Begins an answer whose body comes in pieces. An answer without a length ends where the last piece says so."""
        channel = self._channel
        if channel is None:
            return
        assert not self.is_started, "an exchange is answered once"
        self.is_started = True
        framing = b""
        if status != 200 and not message.has_body(status):
            self._is_bodyless = True
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self._speaks_chunked:
            self._is_chunked = True
            framing = b"transfer-encoding: chunked\r\n"
        else:
            self._keep_alive = False  # the end of the connection is the end of the body
        if self.request.method == b"HEAD":
            self._is_bodyless = True
        closing = b"" if self._keep_alive else message.CLOSE
        channel.send(
            b"%b%b%b%b%b\r\n%b"
            % (
                message.status_line(status),
                headers,
                self.page_headers,
                framing,
                closing,
                self._framed(data, is_last),
            )
        )
        if is_last:
            self._over()

    def write(self, data: bytes, is_last: bool = False) -> None:
        channel = self._channel
        if channel is None:
            return
        if framed := self._framed(data, is_last):
            channel.send(framed)
        if is_last:
            self._over()

    def abort(self) -> None:
        """Drops the connection: a client that was promised more must not take what it has for the whole."""
        channel, self._channel, self.watcher = self._channel, None, None
        if channel is not None:
            channel.drop()

    def upgrade(self, headers: bytes, protocol: Upgraded) -> None:
        """Changes the connection's protocol. The exchange is over then."""
        channel, self._channel, self.watcher = self._channel, None, None
        if channel is None:
            return
        assert self.can_upgrade
        assert not self.is_started, "an exchange is answered once"
        self.is_started = True
        channel.switch(b"%b%b%b\r\n" % (message.status_line(101), message.UPGRADE, headers), protocol)

    def close_after(self) -> None:
        """This answer is the connection's last, if it has not begun yet."""
        self._keep_alive = self._keep_alive and self.is_started

    def lost(self) -> None:
        """Tells the watcher, for the connection, that the client is gone."""
        watcher, self._channel, self.watcher = self.watcher, None, None
        if watcher is not None:
            watcher.client_gone()

    def _framed(self, data: bytes, is_last: bool) -> bytes:
        if self._is_bodyless:
            return b""
        if not self._is_chunked:
            return data
        if not data:  # an empty chunk would be the last one
            return LAST_CHUNK if is_last else b""
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if is_last else b"%x\r\n%b\r\n" % (len(data), data)

    def _over(self) -> None:
        channel, self._channel, self.watcher = self._channel, None, None
        if channel is not None:
            channel.answered(close=not self._keep_alive)
