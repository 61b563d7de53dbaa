"""Length-prefixed msgpack frames over a stream socket: how a server and its engine process talk.

`Mailbox` is the engine's end, for a plain loop: look without waiting between steps, sleep when there is nothing to do.
The server's end is asyncio streams in `client`, over the same `frame`.
"""

from __future__ import annotations

import select
import socket
import struct
import threading

import msgspec

from penstock.engine.messages import FromEngine, ToEngine, to_engine_decoder

_LENGTH = struct.Struct("<I")
_SOCKET_BUFFER_BYTES = 4 << 20  # room for many steps' reports, so that a busy server does not hold the device up
_AT_A_TIME_BYTES = 8 << 20  # of mail that is read before the next step: some milliseconds

encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    return frame_of(encoder.encode(message))


def frame_of(payload: bytes) -> bytes:
    return length_of(len(payload)) + payload


def length_of(num_bytes: int) -> bytes:
    """Length prefix of a frame of so many bytes."""
    return _LENGTH.pack(num_bytes)


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


class Disconnected(Exception):
    """The server's end is closed: there is nobody left to work for."""


class Mailbox:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._reader = FrameReader()
        self._others: list[int] = []
        self._sending = threading.Lock()  # last words may come from a thread that watches

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """The mail there is, so much of it at a time that large messages come between steps and not in place of them;
        with `wait`, sleep until there is some, or other news (see `wake_on`)."""
        messages: list[ToEngine] = []
        num_bytes = 0
        if wait and self._others:
            descriptor, poll = self._socket.fileno(), select.poll()
            for each in (descriptor, *self._others):
                poll.register(each, select.POLLIN)
            wait = any(each == descriptor for each, _ in poll.poll())
        while True:
            try:
                data = self._socket.recv(1 << 20, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionResetError:  # it left reports unread
                raise Disconnected from None
            if not data:
                raise Disconnected
            messages += map(to_engine_decoder.decode, self._reader.feed(data))
            num_bytes += len(data)
            if num_bytes >= _AT_A_TIME_BYTES and (messages or not wait):
                return messages

    def wake_on(self, descriptor: int) -> None:
        """A wait for mail also ends when this can be read."""
        self._others.append(descriptor)

    def send(self, message: FromEngine) -> None:
        try:
            with self._sending:
                self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Disconnected from None
