"""Length-prefixed messages over a stream socket between two ranks or nodes: sent whole, read one at a time.

A length that no message has ends the connection: nothing is set aside for what a stranger announces.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from typing import Any

import msgspec

_LENGTH = struct.Struct("<Q")
_BUFFER_BYTES = 4 << 20
MAX_BYTES = 1 << 30  # of a message between ranks: texts to embed, and a mask for each sequence of a step


class Disconnected(Exception):
    """The other rank's end is closed."""


class Connection:
    def __init__(
        self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], *, max_bytes: int = MAX_BYTES
    ) -> None:
        """`decoder`: of the messages of the other side; `max_bytes`: of one of its messages."""
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = decoder
        self._max_bytes = max_bytes
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
        try:
            self._socket.settimeout(timeout_s)
        except OSError:  # it was closed here, by another thread
            raise Disconnected from None
        (length,) = _LENGTH.unpack(read_exactly(self._socket, _LENGTH.size))
        if length > self._max_bytes:
            raise Disconnected
        try:
            return self._decoder.decode(read_exactly(self._socket, length))
        except msgspec.MsgspecError:  # no message of ours
            raise Disconnected from None

    def detach(self) -> socket.socket:
        """The socket, for whoever goes on with it."""
        return self._socket

    def close(self) -> None:
        """Any thread may: who waits here is told that it is over."""
        close(self._socket)


def read_exactly(sock: socket.socket, length: int) -> bytearray:
    """Raises Disconnected, or TimeoutError by the socket's own time."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = sock.recv_into(view)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
                raise  # the socket's own time; the kernel's means that nobody is there any more
            raise Disconnected from None
        if not count:
            raise Disconnected
        view = view[count:]
    return data


def tune(sock: socket.socket, timeout_s: float) -> None:
    """Options of a socket between nodes: small messages leave at once, and a machine that has gone without a word is
    noticed after about this time."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    each_s = max(1, int(timeout_s / 4))
    for name, value in {
        "TCP_KEEPIDLE": each_s,
        "TCP_KEEPINTVL": each_s,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(timeout_s * 1000),
    }.items():
        if (option := getattr(socket, name, None)) is not None:  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def close(sock: socket.socket) -> None:
    """At once for whoever reads from it in another thread."""
    shut_down(sock)
    sock.close()


def shut_down(sock: socket.socket) -> None:
    """The end for both sides. The descriptor stays its owner's."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
