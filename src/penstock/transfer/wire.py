"""A connection between two engines on which messages and the bytes of blocks follow each other.

Messages are sent by a thread of its own, in order, so that whoever has something to say never waits for a peer that
does not read. Where there is nothing to say it says so every second: a peer that is silent for longer than `timeout_s`,
or does not read for as long, is gone.
"""

from __future__ import annotations

import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.link.connection import Disconnected, read_exactly, shut_down

log = logging.getLogger("penstock.transfer")

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 << 20  # a prompt of a million tokens, and the hashes of its blocks
_MAX_PIECES = 128  # of memory, in one call of the kernel
_BUFFER_BYTES = 4 << 20
_ALIVE_S = 1.0


class Wire:
    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any], *, timeout_s: float) -> None:
        """`decoder`: of the other side's messages."""
        sock.settimeout(timeout_s)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self._socket = sock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = decoder.decode
        self._outgoing: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="kv-send", daemon=True)
        self._sender.start()

    def send(self, message: msgspec.Struct) -> None:
        self._outgoing.put(lambda: self._send(message))

    def do(self, work: Callable[[], None]) -> None:
        """In its place among the messages, in the thread that sends them: it may send bytes."""
        self._outgoing.put(work)

    def send_now(self, message: msgspec.Struct, views: Sequence[memoryview] = ()) -> None:
        """In the sending thread; `views`: bytes that follow. Raises Disconnected."""
        self._send(message)
        self._move(self._socket.sendmsg, views)

    def receive(self) -> Any:
        """The next message. Raises Disconnected."""
        try:
            length = 0
            while not length:  # else it has nothing to say
                (length,) = _LENGTH.unpack(read_exactly(self._socket, _LENGTH.size))
            if length > _MAX_MESSAGE_BYTES:
                raise Disconnected
            return self._decode(read_exactly(self._socket, length))
        except (msgspec.MsgspecError, TimeoutError):
            raise Disconnected from None

    def receive_bytes(self, views: Sequence[memoryview]) -> None:
        """Reads the bytes that follow a message. Raises Disconnected."""
        self._move(lambda pieces: self._socket.recvmsg_into(pieces)[0], views)

    def skip_bytes(self, count: int) -> None:
        scratch = memoryview(bytearray(min(count, 1 << 20)))
        while count:
            part = scratch[: min(count, len(scratch))]
            self.receive_bytes([part])
            count -= len(part)

    def _move(self, call: Callable[[list[memoryview]], int], views: Sequence[memoryview]) -> None:
        """All bytes of these, as many at a time as the kernel takes or has."""
        pieces, at = list(views), 0
        while at < len(pieces):
            done = self._call(call, pieces[at : at + _MAX_PIECES])
            if not done:
                raise Disconnected
            while at < len(pieces) and done >= len(pieces[at]):
                done -= len(pieces[at])
                at += 1
            if done:
                pieces[at] = pieces[at][done:]

    def close(self) -> None:
        """Any thread may. Who waits for the other side is told that it is over. The descriptor stays until `dispose`:
        its number must not become another connection's while a thread may still use it."""
        shut_down(self._socket)
        self._outgoing.put(None)

    def finish(self) -> None:
        """Send what there is to be sent, and nothing after it."""
        self._outgoing.put(None)
        self._sender.join()

    def dispose(self) -> None:
        """Once, by the thread that reads. When it returns nothing is sent any more."""
        self.close()
        self._sender.join()
        self._socket.close()

    def _send_all(self) -> None:
        while True:
            try:
                work = self._outgoing.get(timeout=_ALIVE_S)
                if work is None:
                    return
                work()
            except queue.Empty:
                self._outgoing.put(self._say_nothing)
            except Disconnected:
                shut_down(self._socket)  # who reads notices
            except Exception:
                log.exception("KV blocks or messages could not be sent; the connection ends")
                shut_down(self._socket)

    def _say_nothing(self) -> None:
        self._call(self._socket.sendall, _LENGTH.pack(0))

    def _send(self, message: msgspec.Struct) -> None:
        payload = self._encode(message)
        self._call(self._socket.sendall, _LENGTH.pack(len(payload)) + payload)

    @staticmethod
    def _call(work: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return work(argument)
        except OSError:
            raise Disconnected from None
