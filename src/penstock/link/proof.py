"""The beginning of a connection: which protocol both ends speak, and that both know one secret.

    both        magic, protocol number, penstock's version, 32 random bytes
    who called  HMAC-SHA256 by the secret, over both of these
    the other   0 and such an HMAC of its own; or why not

The secret itself is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct

from penstock import __version__
from penstock.link.connection import Disconnected, read_exactly

_PREAMBLE = struct.Struct("<8sI32s32s")
_ACCEPTED, _WRONG_SECRET = b"\0", b"\1"


class Refused(Exception):
    """No connection, and why: told to whoever reads the log of either side."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final  # to try again is of no use


def prove(
    sock: socket.socket, magic: bytes, protocol: int, secret: bytes, secret_name: str, *, is_caller: bool
) -> None:
    """Both sides show that they know the secret. Raises Refused. `magic`: 8 bytes, of what is spoken; `secret_name`:
    where the secret is set, for whoever reads that it is another."""
    own = _PREAMBLE.pack(magic, protocol, __version__.encode()[:32], os.urandom(32))
    _send(sock, own)
    other = bytes(read_exactly(sock, _PREAMBLE.size))
    its_magic, its_protocol, encoded, _ = _PREAMBLE.unpack(other)
    version = encoded.rstrip(b"\0").decode(errors="replace")
    if its_magic != magic:
        raise Refused("the other side is no penstock", is_final=False)
    if (its_protocol, version) != (protocol, __version__):
        there = f"penstock {version!r} (protocol {its_protocol}) there"
        raise Refused(f"penstock {__version__!r} (protocol {protocol}) here, {there}", is_final=True)
    both = own + other if is_caller else other + own  # the caller's first
    caller_proof = hmac.digest(secret, b"caller" + both, hashlib.sha256)
    proof = hmac.digest(secret, b"called" + both, hashlib.sha256)
    if is_caller:
        _send(sock, caller_proof)
        if read_exactly(sock, 1) != _ACCEPTED:
            raise Refused(f"it has another secret ({secret_name})", is_final=True)
        if not hmac.compare_digest(read_exactly(sock, len(proof)), proof):
            raise Refused("it does not know the secret, though it says so", is_final=True)
        return
    if not hmac.compare_digest(read_exactly(sock, len(caller_proof)), caller_proof):
        _send(sock, _WRONG_SECRET)
        raise Refused(f"it has another secret ({secret_name})", is_final=True)
    _send(sock, _ACCEPTED + proof)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except TimeoutError:
        raise
    except OSError:
        raise Disconnected from None
