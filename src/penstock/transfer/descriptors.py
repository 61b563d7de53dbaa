"""File descriptors handed to processes of the same machine and user that know the secret.

The socket has an abstract name: it is in no directory, and gone with its process. Both sides prove that they know the
secret, as on a KV port, before a descriptor is sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec

from penstock.link.connection import Disconnected, close
from penstock.link.proof import Refused, prove
from penstock.transfer.ports import Unreachable

log = logging.getLogger("penstock.transfer")

_MAGIC, _PROTOCOL, _SECRET = b"PENSTFDS", 1, "gateway_secret"
_TIMEOUT_S = 5.0
_MAX_DESCRIPTORS = 64
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class DescriptorServer:
    """Hands the same descriptors to everybody who may have them, until it is closed."""

    def __init__(self, secret: bytes, descriptors: Sequence[int]) -> None:
        """`descriptors`: they are closed with it."""
        self.name = f"penstock-kv-{uuid4().hex}"
        self._secret, self._descriptors = secret, list(descriptors)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"\0{self.name}")
        self._listening.listen()
        threading.Thread(target=self._accept, name="kv-descriptors", daemon=True).start()

    def close(self) -> None:
        close(self._listening)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                sock, _ = self._listening.accept()
                threading.Thread(target=self._hand_over, args=(sock,), name="kv-descriptors", daemon=True).start()

    def _hand_over(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(Refused, Disconnected, OSError):
            sock.settimeout(_TIMEOUT_S)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                return
            prove(sock, _MAGIC, _PROTOCOL, self._secret, _SECRET, is_caller=False)
            socket.send_fds(sock, [b"\0"], self._descriptors)


class Offered(Protocol):
    """Facts by which a mover reaches another engine's memory."""

    @property
    def socket(self) -> str:
        """The name of the server that hands out its descriptors."""


H = TypeVar("H", bound=Offered)


def fetch_offer(handle: bytes, decoder: msgspec.msgpack.Decoder[H], secret: bytes) -> tuple[H, list[int]]:
    """The facts that a handle has, and the descriptors; whoever asks closes them. Raises Unreachable."""
    try:
        said = decoder.decode(handle)
        return said, fetch_descriptors(said.socket, secret)
    except (msgspec.MsgspecError, OSError, ValueError, Refused, Disconnected) as error:
        raise Unreachable(str(error) or "its memory was not handed over") from None


def fetch_descriptors(name: str, secret: bytes) -> list[int]:
    """From the server of this name; whoever asks closes them. Raises OSError, Refused, Disconnected."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(f"\0{name}")
        prove(sock, _MAGIC, _PROTOCOL, secret, _SECRET, is_caller=True)
        _, descriptors, _, _ = socket.recv_fds(sock, 1, _MAX_DESCRIPTORS)
    if not descriptors:
        raise Disconnected
    return list(descriptors)
