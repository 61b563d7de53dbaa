"""Events of a response that is made in the background: kept in order, for readers that come, leave and come back.

Event n has the sequence number n, so whoever says the last number it has read gets each event once. The log is in the
memory of the process that makes the response, and goes into the store when that has ended; another process of that
store polls it and then tells all of them. Where they are not kept, because there were too many or because the response
ended without its maker, a reader gets the last event alone, with the whole response in it and its next number.
"""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from penstock.api import sse
from penstock.api.responses.objects import Object, encode
from penstock.gateway.records.whole_bill import WholeBill
from penstock.gateway.responses.exchange import BackgroundExchange, response_in
from penstock.http.clock import Timer, TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import EVENT_STREAM, Request

POLL_S = 1.0
_COMMENT_EVERY = 5  # polls
_BATCH = 64  # frames of one write
_MAX_SHARE = 8  # no log has more than this part of the room for all
_EVENTS = b"content-type: text/event-stream"
_GAP = re.compile(rb"\r?\n\r?\n")
_NUMBER = re.compile(rb'"sequence_number":\d+')
_ENDS = ("completed", "incomplete", "failed")
_OF_RESPONSE = re.compile(rb"event: response\.(created|queued|in_progress|completed|incomplete|failed)\r?\n")


class LogRoom:
    """Bytes of all logs of a process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Reader(Protocol):
    def tell(self) -> None:
        """The log has more, or has ended."""

    def leave(self) -> None:
        """The log will have no end."""


class EventLog:
    def __init__(self, begun: Object, room: LogRoom) -> None:
        """`begun`: the response, as it is before anything of it is made."""
        self.frames: list[bytes] = []
        self.is_cut = False  # there were too many
        self.last: Object | None = None  # the response, once its end may be told
        self._begun = begun
        self._room = room
        self._held_bytes = 0
        self._readers: list[Reader] = []
        for name in ("created", "queued"):
            self.add(_frame(f"response.{name}", begun, 0))

    @classmethod
    def of(cls, events: str | None, ended: Object) -> EventLog:
        """The log of a response that has ended, as the store has it."""
        log = cls(ended, LogRoom(0))
        log.frames, log.is_cut = (unpack(events), False) if events is not None else ([], True)
        log.last = ended
        return log

    @property
    def begun(self) -> Object:
        return self._begun

    def add(self, frame: bytes) -> None:
        """An event, whatever its number and the id of its response are: it gets its own."""
        if self.is_cut or self.last is not None:
            return
        if (found := _OF_RESPONSE.match(frame)) is not None:
            inner = response_in(frame) or {}
            frame = _frame(f"response.{found[1].decode()}", inner | {"id": self._begun["id"]}, 0)
        frame = _NUMBER.sub(b'"sequence_number":%d' % len(self.frames), frame, count=1)
        most = self._room.max_bytes
        if self._held_bytes + len(frame) > most // _MAX_SHARE or self._room.held_bytes + len(frame) > most:
            self.is_cut = True
            self.frames = []
            self._release()
            return
        self.frames.append(frame)
        self._held_bytes += len(frame)
        self._room.held_bytes += len(frame)
        self._tell()

    def packed(self, ended: Object) -> str | None:
        """All events, the last among them, for the store; None: they are not kept. Takes its time: for a thread."""
        if self.is_cut:
            return None
        return pack([*self.frames, last_frame(ended, len(self.frames))])

    def finish(self, ended: Object) -> None:
        """The response has ended, and readers may know."""
        if self.last is not None:
            return
        self.last = ended
        if not self.is_cut:
            self.frames.append(last_frame(ended, len(self.frames)))
        self._release()
        self._tell()
        self._readers.clear()

    def give_up(self) -> None:
        """Another process makes the response anew: its end is in the store, for readers that come back."""
        readers, self._readers = self._readers, []
        self.is_cut, self.frames = True, []
        self._release()
        for reader in readers:
            reader.leave()

    def join(self, reader: Reader) -> None:
        self._readers.append(reader)

    def leave(self, reader: Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)

    def _tell(self) -> None:
        for reader in list(self._readers):
            reader.tell()

    def _release(self) -> None:
        self._room.held_bytes -= self._held_bytes
        self._held_bytes = 0


class LoggedExchange(BackgroundExchange):
    """A background response that is made as a stream, whose events go into a log. Its last event is held back: the end
    is told when it is kept."""

    __slots__ = ("_has_events", "_response", "_rest", "log")

    def __init__(
        self,
        request: Request,
        key: tuple[str, str],
        ended: Callable[[BackgroundExchange, int, bytes], None],
        bill: WholeBill | None,
        log: EventLog,
    ) -> None:
        super().__init__(request, key, ended, bill)
        self.log = log
        self._has_events = False
        self._rest = b""
        self._response: tuple[int, bytes] = (502, b"")  # status and body, as if it had not been streamed

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self._has_events = status == 200 and _EVENTS in headers
        super().start(status, headers, length=length, data=data, is_last=is_last)

    def write(self, data: bytes, is_last: bool = False) -> None:
        if not self._has_events:
            super().write(data, is_last)
            return
        if not self.is_open:
            return
        *frames, self._rest = _GAP.split(self._rest + data)
        for frame in frames:
            self._take(frame)
        if is_last:
            self._status, body = self._response
            super().write(body, is_last=True)

    def abort(self) -> None:
        if self.is_open:
            super().write(b"", is_last=True)

    def _take(self, frame: bytes) -> None:
        if frame.startswith(b'data: {"error"'):
            body = frame.removeprefix(b"data: ")
            self._response = (_status_of(body), body)
        elif frame.startswith(tuple(b"event: response.%b" % end.encode() for end in _ENDS)):
            self._response = (200, encode(response_in(frame) or {}))
        elif frame.startswith(b"event: ") and not frame.startswith(b"event: response.created"):
            self.log.add(frame + b"\n\n")


class LogReader:
    """A client that reads a log of this process: the watcher of its exchange."""

    def __init__(self, exchange: Exchange, headers: bytes | None, log: EventLog, after: int) -> None:
        """`after`: number of the last event that the client has; -1: none. `headers`: None: the answer has begun."""
        self._exchange = exchange
        self._log = log
        self._at = after + 1
        self._is_paused = False
        if not exchange.is_open:
            return
        exchange.watcher = self
        if headers is not None:
            exchange.start(200, EVENT_STREAM + headers)
        if log.last is None:
            log.join(self)
        self.tell()

    def tell(self) -> None:
        log, exchange = self._log, self._exchange
        while exchange.is_open and not self._is_paused:
            frames = log.frames[self._at : self._at + _BATCH]
            self._at += len(frames)
            is_last = log.last is not None and self._at >= len(log.frames)
            if is_last and log.is_cut:
                assert log.last is not None
                frames = [last_frame(log.last, self._at)]
            if not frames and not is_last:
                return
            exchange.write(b"".join(frames), is_last)

    def leave(self) -> None:
        self._exchange.write(b"", is_last=True)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self.tell()

    def client_gone(self) -> None:
        self._log.leave(self)


class Look(NamedTuple):
    """A response in the store, as its reader finds it."""

    response: Object
    is_active: bool
    events: str | None  # packed


class StoreReader:
    """A client that reads events of a response which another process makes, or made: it polls the store."""

    def __init__(
        self, exchange: Exchange, headers: bytes, clock: TimerClock, look: Callable[[StoreReader], None], after: int
    ) -> None:
        """`look`: asks the store, and calls `seen` or `wait`."""
        self._exchange = exchange
        self._clock = clock
        self._look = look
        self._at = after + 1
        self._num_polls = 0
        self._timer: Timer | None = None
        exchange.watcher = self
        exchange.start(200, EVENT_STREAM + headers)

    def seen(self, found: Look | None) -> None:
        """None: the response is gone."""
        if not self._exchange.is_open:
            return
        if found is not None and not found.is_active:
            LogReader(self._exchange, None, EventLog.of(found.events, found.response), self._at - 1)
            return
        if found is None:
            self._exchange.write(b"", is_last=True)
            return
        self.wait()

    def wait(self) -> None:
        """The store is asked again in a while."""
        if not self._exchange.is_open:
            return
        self._num_polls += 1
        if self._num_polls % _COMMENT_EVERY == 0:
            self._exchange.write(b": it is being made by another process\n\n")
        self._timer = self._clock.call_later(POLL_S, self._look, self)

    def client_gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def last_frame(ended: Object, number: int) -> bytes:
    return _frame(f"response.{ended.get('status')}", ended, number)


def pack(frames: list[bytes]) -> str:
    return b64encode(zlib.compress(b"".join(frames))).decode()


def unpack(events: str) -> list[bytes]:
    whole = zlib.decompress(b64decode(events))
    return [frame + b"\n\n" for frame in whole.split(b"\n\n") if frame]


def _frame(kind: str, response: Object, number: int) -> bytes:
    return sse.event(encode({"type": kind, "sequence_number": number, "response": response}), kind.encode())


def _status_of(body: bytes) -> int:
    """The status of an error that was told in a stream, from its type."""
    try:
        kind = msgspec.json.decode(body)["error"]["type"]
    except (ValueError, KeyError, TypeError):
        return 500
    return {"rate_limit_error": 429, "insufficient_quota": 429, "invalid_request_error": 400}.get(kind, 500)
