"""Handshake of every connection between nodes: which protocol, who knows the secret, and what both must have in common.
The socket is a rank's afterwards, and this module is done with it.

    both        proof that they know the secret: `link.proof`
    who called  a `Hello`
    the other   an `Answer`

Later messages are neither encrypted nor signed: they are for a network of one's own.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from penstock.link.connection import Connection, Disconnected, tune
from penstock.link.proof import Refused, prove
from penstock.runner.ranks.messages import GroupIdentity, Hello, Refusal, Welcome, answer_decoder, hello_decoder

PROTOCOL = 2  # raised whenever messages between ranks or nodes change
HANDSHAKE_S = 10.0
MAX_HELLO_BYTES = 4 << 20  # digests of a model's files, of which there may be thousands
_MAGIC = b"PENSTOCK"
_SECRET = "PENSTOCK_RANKS_SECRET, or else gateway_secret"


def dial(address: tuple[str, int], hello: Hello, secret: bytes, timeout_s: float, source: str = "") -> socket.socket:
    """A connection to another node that has been welcomed. Raises OSError where nobody answers, and Refused.
    `timeout_s`: see `tune`; `source`: own address."""
    sock = socket.create_connection(address, HANDSHAKE_S, (source, 0) if source else None)
    try:
        tune(sock, timeout_s)
        sock.settimeout(HANDSHAKE_S)
        prove(sock, _MAGIC, PROTOCOL, secret, _SECRET, is_caller=True)
        connection = Connection(sock, answer_decoder, max_bytes=MAX_HELLO_BYTES)
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
    prove(sock, _MAGIC, PROTOCOL, secret, _SECRET, is_caller=False)
    connection = Connection(sock, hello_decoder, max_bytes=MAX_HELLO_BYTES)
    return connection.receive(HANDSHAKE_S), connection


def welcome(connection: Connection) -> None:
    connection.send(Welcome())


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
