"""The beginning of every connection between nodes: which protocol, who knows the secret, and what both must have in
common. After it the socket is a rank's, and this module is done with it.

    both        magic, protocol number, penstock's version, 32 random bytes
    who called  HMAC-SHA256 by the secret, over both of these
    the other   0 and such an HMAC of its own; or why not
    who called  a `Hello`
    the other   an `Answer`

The secret itself is never sent. What follows is neither encrypted nor signed: it is for a network of one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator

from penstock import __version__
from penstock.runner.ranks.connection import Connection, Disconnected, read_exactly, tune
from penstock.runner.ranks.messages import Answer, GroupIdentity, Hello, Refusal, Welcome

PROTOCOL = 1  # raised whenever messages between ranks or nodes change
HANDSHAKE_S = 10.0
MAX_HELLO_BYTES = 4 << 20  # digests of a model's files, of which there may be thousands
_PREAMBLE = struct.Struct("<8sI32s32s")
_MAGIC = b"PENSTOCK"
_ACCEPTED, _WRONG_SECRET = b"\0", b"\1"


class Refused(Exception):
    """No connection, and why: told to whoever reads the log of either side."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final  # to try again is of no use


def dial(address: tuple[str, int], hello: Hello, secret: bytes, timeout_s: float, source: str = "") -> socket.socket:
    """A connection to another node that has been welcomed. Raises OSError where nobody answers, and Refused.
    `timeout_s`: see `tune`; `source`: own address."""
    sock = socket.create_connection(address, HANDSHAKE_S, (source, 0) if source else None)
    try:
        tune(sock, timeout_s)
        sock.settimeout(HANDSHAKE_S)
        _prove(sock, secret, is_caller=True)
        connection = Connection(sock, Answer, max_bytes=MAX_HELLO_BYTES)
        connection.send(hello)
        answer = connection.receive(HANDSHAKE_S)
        if isinstance(answer, Refusal):
            raise Refused(answer.reason, is_final=answer.is_final)
    except BaseException as error:
        sock.close()
        if isinstance(error, Disconnected):
            raise ConnectionResetError("the connection was closed during the handshake") from None
        raise
    sock.settimeout(None)
    return sock


def receive_hello(sock: socket.socket, secret: bytes, timeout_s: float) -> tuple[Hello, Connection]:
    """The other side, up to the `Hello`: `Connection.send` takes the answer. Raises Refused, Disconnected and
    TimeoutError."""
    tune(sock, timeout_s)
    sock.settimeout(HANDSHAKE_S)
    _prove(sock, secret, is_caller=False)
    connection = Connection(sock, Hello, max_bytes=MAX_HELLO_BYTES)
    return connection.receive(HANDSHAKE_S), connection


def welcome(connection: Connection) -> None:
    connection.send(Welcome())


def _prove(sock: socket.socket, secret: bytes, *, is_caller: bool) -> None:
    """Both sides show that they know the secret. Raises Refused."""
    own = _PREAMBLE.pack(_MAGIC, PROTOCOL, __version__.encode()[:32], os.urandom(32))
    _send(sock, own)
    other = bytes(read_exactly(sock, _PREAMBLE.size))
    magic, protocol, encoded, _ = _PREAMBLE.unpack(other)
    version = encoded.rstrip(b"\0").decode(errors="replace")
    if magic != _MAGIC:
        raise Refused("the other side is no penstock", is_final=False)
    if (protocol, version) != (PROTOCOL, __version__):
        there = f"penstock {version!r} (protocol {protocol}) there"
        raise Refused(f"penstock {__version__!r} (protocol {PROTOCOL}) here, {there}", is_final=True)
    both = own + other if is_caller else other + own  # the caller's first
    caller_proof = hmac.digest(secret, b"caller" + both, hashlib.sha256)
    proof = hmac.digest(secret, b"called" + both, hashlib.sha256)
    if is_caller:
        _send(sock, caller_proof)
        if read_exactly(sock, 1) != _ACCEPTED:
            raise Refused("it has another secret (PENSTOCK_RANKS_SECRET, or else gateway_secret)", is_final=True)
        if not hmac.compare_digest(read_exactly(sock, len(proof)), proof):
            raise Refused("it does not know the secret, though it says so", is_final=True)
        return
    if not hmac.compare_digest(read_exactly(sock, len(caller_proof)), caller_proof):
        _send(sock, _WRONG_SECRET)
        raise Refused("it has another secret (PENSTOCK_RANKS_SECRET, or else gateway_secret)", is_final=True)
    _send(sock, _ACCEPTED + proof)


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except TimeoutError:
        raise
    except OSError:
        raise Disconnected from None


def differences(leader: GroupIdentity, node: GroupIdentity, number: int) -> str:
    """Properties that the two do not have in common, by name; empty: none."""
    return "; ".join(_differences(leader, node, f"on node {number}"))


def _differences(leader: GroupIdentity, node: GroupIdentity, there: str) -> Iterator[str]:
    if leader.num_nodes != node.num_nodes:
        yield f"nnodes is {leader.num_nodes} at the leader and {node.num_nodes} {there}"
    for name, asked in node.asked.items():
        if asked != (found := getattr(leader.parallelism, name, None)):
            yield f"{name} is {found} at the leader and {asked} {there}"
    for name in sorted(leader.formats.keys() | node.formats.keys()):
        ours, theirs = leader.formats.get(name, "unknown"), node.formats.get(name, "unknown")
        if ours != theirs:
            yield f"{name} is {ours} at the leader and {theirs} {there}"
    if leader.config != node.config:
        yield f"the model's shape {there} is not the leader's: its config.json differs, or it is another model"
    elif leader.files != node.files:
        names = [
            name
            for name in sorted(leader.files.keys() | node.files.keys())
            if leader.files.get(name) != node.files.get(name)
        ]
        yield f"weights {there} are not the leader's: {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
