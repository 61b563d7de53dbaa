"""Length-prefixed messages over a stream socket between two ranks: sent whole, read one at a time."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 4 << 20


class Disconnected(Exception):
    """The other rank's end is closed."""


class Connection:
    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        """`incoming`: the type of what the other side sends."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._sending = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            raise Disconnected from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """`timeout_s`: raises TimeoutError where nothing comes for so long; None: it waits."""
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                raise
            except OSError:
                raise Disconnected from None
            if not count:
                raise Disconnected
            view = view[count:]
        return data
