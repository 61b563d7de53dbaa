"""WebSocket frames (RFC 6455, section 5), a server's side of them: bytes become messages, and messages bytes.

Sans-I/O: it knows no socket and no clock. What comes must be masked and what goes is not; there are no extensions, so
no compression, and messages that go are never fragmented. Written by hand rather than taken from wsproto: it is two
hundred lines that are read with the bounds they keep, and a dependency less in the way of every hostile byte; tests
hold it to the `websockets` library as its peer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple


class Opcode(IntEnum):
    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class CloseCode(IntEnum):
    """Reasons to close, with the numbers of section 7.4.1 and of IANA's registry."""

    NORMAL = 1000
    GOING_AWAY = 1001
    PROTOCOL_ERROR = 1002
    UNSUPPORTED_DATA = 1003
    NONE = 1005  # never sent: the close frame was empty
    ABNORMAL = 1006  # never sent: there was no close frame
    INVALID_DATA = 1007
    POLICY_VIOLATION = 1008
    MESSAGE_TOO_BIG = 1009
    INTERNAL_ERROR = 1011
    TRY_AGAIN_LATER = 1013


_SENDABLE = frozenset((1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014))
_MAX_CONTROL = 125  # bytes of a control frame's payload
_MASKED = 0x80
_FINAL = 0x80
_RESERVED = 0x70
_CONTROL = 0x08


class FrameError(Exception):
    """These bytes are no frame that a client may send; `code` and `reason` go into the close frame."""

    def __init__(self, code: CloseCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Message(NamedTuple):
    """Text, valid UTF-8, or bytes."""

    data: bytes
    is_text: bool


class Ping(NamedTuple):
    data: bytes


class Pong(NamedTuple):
    data: bytes


class Close(NamedTuple):
    code: int  # CloseCode.NONE if there was none
    reason: str


Event = Message | Ping | Pong | Close


class FrameReader:
    """A client's bytes, as they come in pieces of any size. Nothing is held but the frame that is arriving and the
    message that it is part of, together at most `max_message_bytes` and a header."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes  # may be changed between two messages
        self._buffer = bytearray()
        self._at = 0  # what is before this was read
        self._message = bytearray()  # fragments so far
        self._opcode: int | None = None  # of the message whose fragments these are
        self._declared_bytes = 0  # of the frame that is arriving
        self._is_closed = False

    @property
    def is_inside(self) -> bool:
        """Part of a message, or of a frame, is here."""
        return len(self._buffer) > self._at or self._opcode is not None

    @property
    def wanted_bytes(self) -> int:
        """Room that the message which is arriving takes, as far as it is declared."""
        return len(self._message) + self._declared_bytes

    def feed(self, data: bytes) -> Iterator[Event]:
        """Events that are complete with this. Raises FrameError, after those before it; then, and after a close frame,
        nothing more is read."""
        if self._is_closed:
            return
        self._buffer += data
        while not self._is_closed:
            try:
                event = self._next()
            except FrameError:
                self._is_closed = True
                raise
            if event is None:
                break
            if event is not _NOTHING:
                self._is_closed = isinstance(event, Close)
                yield event
        del self._buffer[: self._at]
        self._at = 0

    def _next(self) -> Event | None:
        """The next event; None: its frame is not here. `_NOTHING`: the frame completed no event."""
        buffer, at = self._buffer, self._at
        if len(buffer) - at < 2:
            return None
        first, second = buffer[at], buffer[at + 1]
        opcode, length = self._checked(first, second), second & 0x7F
        header = 6 + (0 if length < 126 else 2 if length == 126 else 8)
        if len(buffer) - at < header:
            return None
        if length == 126:
            length = int.from_bytes(buffer[at + 2 : at + 4], "big")
            if length < 126:
                raise FrameError(CloseCode.PROTOCOL_ERROR, "a length is written with more bytes than it needs")
        elif length == 127:
            length = int.from_bytes(buffer[at + 2 : at + 10], "big")
            if length < 1 << 16:
                raise FrameError(CloseCode.PROTOCOL_ERROR, "a length is written with more bytes than it needs")
        if not opcode & _CONTROL and len(self._message) + length > self.max_message_bytes:
            raise FrameError(CloseCode.MESSAGE_TOO_BIG, f"a message has at most {self.max_message_bytes} bytes")
        end = at + header + length
        if len(buffer) < end:
            self._declared_bytes = length
            return None
        payload = _unmasked(bytes(buffer[at + header : end]), bytes(buffer[at + header - 4 : at + header]))
        self._at, self._declared_bytes = end, 0
        return self._event(opcode, bool(first & _FINAL), payload)

    def _checked(self, first: int, second: int) -> int:
        """The frame's opcode, if its first two bytes are a client's."""
        opcode = first & 0x0F
        if first & _RESERVED:
            raise FrameError(CloseCode.PROTOCOL_ERROR, "a reserved bit is set: there are no extensions")
        if not second & _MASKED:
            raise FrameError(CloseCode.PROTOCOL_ERROR, "a client masks its frames")
        if opcode not in _OPCODES:
            raise FrameError(CloseCode.PROTOCOL_ERROR, f"there is no opcode {opcode}")
        if opcode & _CONTROL:
            if not first & _FINAL or second & 0x7F > _MAX_CONTROL:
                raise FrameError(CloseCode.PROTOCOL_ERROR, "a control frame is one frame of at most 125 bytes")
        elif (opcode == Opcode.CONTINUATION) != (self._opcode is not None):
            raise FrameError(
                CloseCode.PROTOCOL_ERROR, "a fragment belongs to no message, or a message is not at its end"
            )
        return opcode

    def _event(self, opcode: int, is_final: bool, payload: bytes) -> Event:
        if opcode == Opcode.PING:
            return Ping(payload)
        if opcode == Opcode.PONG:
            return Pong(payload)
        if opcode == Opcode.CLOSE:
            return _close_of(payload)
        if opcode != Opcode.CONTINUATION:
            if is_final:
                return _message(payload, opcode)
            self._opcode = opcode
        self._message += payload
        if not is_final:
            return _NOTHING
        assert self._opcode is not None
        whole, kind = bytes(self._message), self._opcode
        self._message, self._opcode = bytearray(), None
        return _message(whole, kind)


_OPCODES = frozenset(Opcode)
_NOTHING = Pong(b"")  # compared by identity


def text(data: bytes) -> bytes:
    """A text message of one frame; `data` is UTF-8."""
    return _frame(Opcode.TEXT, data)


def ping(data: bytes = b"") -> bytes:
    return _frame(Opcode.PING, data)


def pong(data: bytes) -> bytes:
    return _frame(Opcode.PONG, data)


def close(code: int, reason: str = "") -> bytes:
    """A reason that is too long for the frame is cut, between two characters."""
    said = reason.encode()[: _MAX_CONTROL - 2].decode(errors="ignore").encode()
    return _frame(Opcode.CLOSE, b"" if code == CloseCode.NONE else struct.pack("!H", code) + said)


def _frame(opcode: Opcode, payload: bytes) -> bytes:
    length = len(payload)
    if length < 126:
        return bytes((_FINAL | opcode, length)) + payload
    if length < 1 << 16:
        return struct.pack("!BBH", _FINAL | opcode, 126, length) + payload
    return struct.pack("!BBQ", _FINAL | opcode, 127, length) + payload


def _message(data: bytes, opcode: int) -> Message:
    if opcode == Opcode.BINARY:
        return Message(data, False)
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError:
            raise FrameError(CloseCode.INVALID_DATA, "text is UTF-8") from None
    return Message(data, True)


def _close_of(payload: bytes) -> Close:
    if not payload:
        return Close(CloseCode.NONE, "")
    if len(payload) == 1:
        raise FrameError(CloseCode.PROTOCOL_ERROR, "a close code has two bytes")
    code = int.from_bytes(payload[:2], "big")
    if code not in _SENDABLE and not 3000 <= code <= 4999:
        raise FrameError(CloseCode.PROTOCOL_ERROR, f"{code} is no close code to send")
    try:
        return Close(code, payload[2:].decode())
    except UnicodeDecodeError:
        raise FrameError(CloseCode.INVALID_DATA, "a reason is UTF-8") from None


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    """The payload as one number, xor the mask as one: a megabyte takes a millisecond; a loop over bytes, a hundred."""
    length = len(payload)
    if not length or mask == b"\0\0\0\0":
        return payload
    key = (mask * (length // 4 + 1))[:length]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(length, "little")
