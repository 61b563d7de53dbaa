"""A man in the middle of a connection: it changes, holds back, repeats and cuts what goes through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

_BUFFER_BYTES = 1 << 14  # of what has come and is not passed on: else all of it would be on its way before it is held
Change = Callable[[int, bytes], bytes]  # what comes, and where in its direction: what goes on


def as_it_is(_at: int, data: bytes) -> bytes:
    return data


class Relay:
    """Every connection to `address` goes on to a port of this machine. `down`: of what that port says."""

    def __init__(self, port: int, *, up: Change = as_it_is, down: Change = as_it_is) -> None:
        self._port, self._up, self._down = port, up, down
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_down = 0  # bytes of the last connection
        self.num_up = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                called = socket.socket()
                called.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                called.connect(("127.0.0.1", self._port))
                self._sockets += [caller, called]
                self.num_up = self.num_down = 0
                threading.Thread(target=self._carry, args=(caller, called, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(called, caller, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_down: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                begin, at = at, at + len(data)
                if is_down:  # counted first: who has got the bytes may ask how many there were
                    self.num_down = at
                else:
                    self.num_up = at
                target.sendall((self._down if is_down else self._up)(begin, data))
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for each in self._sockets:
            each.close()


def flip(place: int) -> Change:
    """One byte becomes another."""

    def change(at: int, data: bytes) -> bytes:
        if not at <= place < at + len(data):
            return data
        changed = bytearray(data)
        changed[place - at] ^= 0x41
        return bytes(changed)

    return change


class Hold:
    """A change that lets nothing go on after so many bytes of the first connection, until the test says so."""

    def __init__(self, place: int) -> None:
        self._place = place
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, at: int, data: bytes) -> bytes:
        if at + len(data) > self._place and not self.released.is_set():
            self.reached.set()
            self.released.wait(120)
        return data


class Cut(OSError):
    """The error of a relay that ends the connection."""


def cut_at(place: int) -> Change:
    """Returns a change that lets nothing through after so many bytes."""

    def change(at: int, data: bytes) -> bytes:
        if at + len(data) > place:
            raise Cut
        return data

    return change
