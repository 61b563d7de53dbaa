"""Sessions under messages that make little sense: each gets its answer, and none breaks the socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from penstock.api.page_guard import PageGuard
from penstock.http.exchange import Exchange, NoChannel, Upgraded
from penstock.http.message import Request
from penstock.websocket.endpoint import PATHS, WebSockets
from penstock.websocket.settings import WebSocketSettings

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
HANDSHAKE = {b"host": b"x", b"sec-websocket-version": b"13", b"sec-websocket-key": KEY}
EVENTS = b"content-type: text/event-stream\r\n"


class Wire(NoChannel):
    """A connection whose other end is the `websockets` library: the channel of the handshake, then its link."""

    peer = "127.0.0.1"
    now = 0.0
    unsent_bytes = 0

    def __init__(self) -> None:
        self.client = Protocol(CLIENT, max_size=None)
        self.client.state = OPEN
        self.protocol: Upgraded | None = None

    def switch(self, head: bytes, protocol: Upgraded) -> None:
        self.protocol = protocol
        protocol.opened(self)

    def send(self, data: bytes) -> None:
        self.client.receive_data(data)

    def say(self, message: bytes) -> list[Any]:
        """What is told before, and while, this message is read."""
        assert self.protocol is not None
        self.client.send_text(message)
        self.protocol.received(b"".join(self.client.data_to_send()))
        return self.heard()

    def heard(self) -> list[Any]:
        frames = [event for event in self.client.events_received() if isinstance(event, Frame)]
        assert self.client.close_rcvd is None, self.client.close_rcvd
        return [json.loads(frame.data) for frame in frames if frame.opcode is Opcode.TEXT]

    def hold_reading(self, is_held: bool) -> None: ...
    def reserve(self, owner: str, num_bytes: int) -> bool:
        return True

    def release(self, owner: str, num_bytes: int) -> None: ...
    def close(self) -> None: ...
    def linger(self) -> None: ...


def connected(path: bytes) -> tuple[Wire, list[Exchange]]:
    exchanges: list[Exchange] = []
    sockets = WebSockets(exchanges.append, lambda headers, peer: "one", PageGuard(), WebSocketSettings(max_requests=4))
    wire = Wire()
    exchange = Exchange(wire, Request(b"GET", path, dict(HANDSHAKE), b""), False, False)
    exchange.can_upgrade = True
    sockets(exchange)
    return wire, exchanges


words = st.sampled_from(
    ["a", "b", "", "request", "cancel", "auth", "response.create", "response.cancel", "x" * 200, "\ud800"]
)
names = st.sampled_from(
    ["type", "id", "body", "headers", "key", "stream_id", "response_id", "stream", "background", "input"]
)
values = st.recursive(
    words | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)
messages = st.dictionaries(names, values, max_size=5).map(lambda message: json.dumps(message).encode())
raw = st.sampled_from([b"", b"null", b"[", b'{"type":"request","id":"\\ud800","body":{}}', b'{"type":' + b"[" * 3000])


@pytest.mark.parametrize("path", sorted(PATHS))
@given(said=st.lists(messages | raw, max_size=8), ends=st.lists(st.integers(0, 5), max_size=8))
def test_every_message_that_is_no_request_gets_an_error_and_the_socket_lives(
    path: bytes, said: list[bytes], ends: list[int]
) -> None:
    wire, exchanges = connected(path)
    for number, message in enumerate(said):
        before = len(exchanges)
        answers = wire.say(message)
        is_request = len(exchanges) > before
        assert is_request or answers or b"response.create" in message, message
        for answer in answers:
            assert answer["type"] in ("error", "authenticated", "cancelled", "response.cancelled"), answer
        if exchanges and number < len(ends):
            end(exchanges[ends[number] % len(exchanges)], ends[number])
            wire.heard()
    assert wire.protocol is not None
    wire.protocol.lost()
    assert not any(exchange.is_open for exchange in exchanges)


def end(exchange: Exchange, how: int) -> None:
    """As an application, or a hostile server behind it, might."""
    if exchange.is_started or not exchange.is_open:
        exchange.abort()
    elif how == 0:
        exchange.respond(200, b"content-type: application/json\r\n", b"{}")
    elif how == 1:
        exchange.respond(500, b"", b"\xff")
    elif how == 2:
        exchange.start(
            200, EVENTS, data=b'event: response.created\ndata: {"response":7}\n\ndata: [DONE]\n\n', is_last=True
        )
    elif how == 3:
        exchange.start(200, EVENTS, data=b'data: {"a":"\xff"}\n\n', is_last=True)
    else:
        exchange.start(200, EVENTS, data=b'data: {"error":')
