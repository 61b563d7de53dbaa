"""One WebSocket on a connection that has changed protocols: messages in and out, pings, and the end.

It keeps the deadlines of RFC 6455's close handshake, of messages that arrive in pieces, and of clients that say
nothing any more. What the messages mean is its listener's business.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from penstock.http.exchange import NOBODY, Link
from penstock.websocket import frames
from penstock.websocket.frames import Close, CloseCode, FrameError, FrameReader, Message, Ping
from penstock.websocket.settings import WebSocketSettings

_CLOSE_TIMEOUT_S = 5.0  # for the client's half of the close handshake
_FREE_BYTES = 16 << 10  # of a message that is arriving, which take no room of others
_MAX_UNSENT_BYTES = 256 << 10  # beyond it a client that does not read is not read from either


class Listener(Protocol):
    """The listener to a socket's messages. Called from the event loop; nothing comes after `closed`."""

    def opened(self) -> None: ...
    def message(self, data: bytes) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def sweep(self, now: float) -> None: ...
    def drain(self) -> None: ...
    def closed(self, code: int) -> None: ...


class WebSocket:
    """The protocol of an upgraded connection (`http.exchange.Upgraded`)."""

    def __init__(self, settings: WebSocketSettings, owner: str | None) -> None:
        """`owner`: whose room a long message takes while it arrives; None: nobody has said, and none may be long."""
        self.listener: Listener | None = None  # None: it has been told of the end
        self.is_paused = False
        self._settings = settings
        self._owner = owner
        self._reader = FrameReader(_FREE_BYTES if owner is None else settings.max_message_bytes)
        self._link: Link
        self._is_open = True  # messages may be sent
        self._drops_at = inf  # once it is closing
        self._heard_at = 0.0
        self._ping_sent_at: float | None = None
        self._message_due = inf
        self._owed_pong: bytes | None = None  # to a client that does not read: the last one is enough
        self._held = ("", 0)  # room, and whose

    @property
    def peer(self) -> str:
        return self._link.peer if self._is_open else NOBODY

    @property
    def now(self) -> float:
        return self._link.now

    def belongs_to(self, owner: str) -> None:
        """Somebody has said whose it is."""
        self._owner = owner
        self._reader.max_message_bytes = self._settings.max_message_bytes

    def send(self, data: bytes) -> None:
        """A text message; nothing once the socket closes."""
        if self._is_open:
            self._link.send(frames.text(data))

    def close(self, code: int, reason: str = "") -> None:
        """Begins the close handshake: nothing is said after it, and what comes is not heard."""
        if not self._is_open:
            return
        self._link.send(frames.close(code, reason))
        self._drops_at = self._link.now + _CLOSE_TIMEOUT_S
        self._ended(code)

    # -- the connection's side

    def opened(self, link: Link) -> None:
        self._link = link
        self._heard_at = link.now
        assert self.listener is not None
        self.listener.opened()

    def received(self, data: bytes) -> None:
        self._heard_at, self._ping_sent_at = self._link.now, None
        try:
            for event in self._reader.feed(data):
                self._handle(event)
        except FrameError as error:
            if self._is_open:
                self._link.send(frames.close(error.code, error.reason))
                self._ended(error.code)
            self._link.linger()
            return
        if self._is_open:
            self._arriving()

    def pause(self) -> None:
        self.is_paused = True
        if self.listener is not None:
            self.listener.pause()

    def resume(self) -> None:
        self.is_paused = False
        if self._is_open:
            self._link.hold_reading(False)
        pong, self._owed_pong = self._owed_pong, None
        if pong is not None and self._is_open:
            self._link.send(frames.pong(pong))
        if self.listener is not None:
            self.listener.resume()

    def sweep(self, now: float) -> None:
        if now >= self._drops_at:
            self._link.drop()
        elif self._is_open and now >= self._message_due:
            self.close(CloseCode.POLICY_VIOLATION, "the message did not arrive in time")
        elif self._is_open:
            self._check_alive(now)
            if self.listener is not None:
                self.listener.sweep(now)

    def drain(self) -> None:
        if self.listener is not None:
            self.listener.drain()

    def lost(self) -> None:
        self._ended(CloseCode.ABNORMAL)

    # -- inside

    def _handle(self, event: frames.Event) -> None:
        match event:
            case Close(code):
                if self._is_open:
                    self._link.send(frames.close(code))
                    self._ended(code)
                self._link.close()
            case _ if not self._is_open:
                pass  # what was on its way when we closed
            case Message(data, True):
                self._release()
                if self.listener is not None:
                    self.listener.message(data)
            case Message():
                self.close(CloseCode.UNSUPPORTED_DATA, "messages are text: JSON")
            case Ping(data) if self.is_paused:
                self._owed_pong = data
            case Ping(data):
                self._link.send(frames.pong(data))

    def _arriving(self) -> None:
        """The rest is part of a message: it is timed, and takes room if it is long."""
        if self.is_paused and self._link.unsent_bytes > _MAX_UNSENT_BYTES:
            self._link.hold_reading(True)
        if not self._reader.is_inside:
            self._message_due = inf
            self._release()
            return
        if self._message_due == inf:
            self._message_due = self._link.now + self._settings.message_timeout_s
        owner, held_bytes = self._held
        if (wanted := self._reader.wanted_bytes) > max(held_bytes, _FREE_BYTES):
            owner = owner if held_bytes else self._owner or ""
            if not self._link.reserve(owner, wanted - held_bytes):
                self.close(CloseCode.TRY_AGAIN_LATER, "too many messages arrive at once")
                return
            self._held = (owner, wanted)

    def _release(self) -> None:
        (owner, num_bytes), self._held = self._held, ("", 0)
        if num_bytes:
            self._link.release(owner, num_bytes)

    def _check_alive(self, now: float) -> None:
        if self.is_paused:  # it is sent nothing, and dropped when it takes nothing for too long
            return
        if self._ping_sent_at is not None:
            if now >= self._ping_sent_at + self._settings.pong_timeout_s:
                self._link.drop()
        elif now >= self._heard_at + self._settings.ping_every_s:
            self._ping_sent_at = now
            self._link.send(frames.ping())

    def _ended(self, code: int) -> None:
        self._is_open = False
        self._message_due = inf
        self._release()
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.closed(code)
