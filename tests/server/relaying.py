"""A gateway's work on relayed streams, in a few lines: ask, cut, and carry on at another replica."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator

from penstock.api import relay
from penstock.api.relay import StreamRecord


@contextlib.contextmanager
def asking(
    address: tuple[str, int], path: str, body: bytes, mode: str | None = relay.STREAM, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, body, headers | ({relay.HEADER: mode} if mode else {}))
        yield connection.getresponse()


def ask(address: tuple[str, int], path: str, body: bytes, mode: str | None = relay.STREAM) -> bytes:
    """The whole answer to a request that must be taken."""
    with asking(address, path, body, mode) as response:
        content = response.read()
        assert response.status == 200, content
        return content


def carry_on(record: StreamRecord, address: tuple[str, int], path: str, body: bytes) -> bytes:
    envelope = record.envelope(body)
    assert envelope is not None
    return ask(address, path, envelope, relay.ENVELOPE)


def block_ends(stream: bytes) -> list[int]:
    """Every place where a gateway can have stopped forwarding."""
    ends, end = [], 0
    while (found := stream.find(b"\n\n", end)) >= 0:
        ends.append(end := found + 2)
    return ends


def events(stream: bytes) -> list[bytes]:
    """Returns what a client reads: everything but comments."""
    return [block for block in stream.split(b"\n\n")[:-1] if not block.startswith(b":")]


def by_choice(stream: bytes) -> dict[int | None, list[bytes]]:
    """Events in the order of each choice; how choices mix is up to time."""
    found: dict[int | None, list[bytes]] = {}
    for event in events(stream):
        data = event.rpartition(b"data: ")[2]
        choices = [] if data == b"[DONE]" else json.loads(data).get("choices", [])
        found.setdefault(choices[0]["index"] if choices else None, []).append(event)
    return found
