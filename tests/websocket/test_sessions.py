"""Sockets of a bare server, whose application is the test: it sees each request's exchange, and answers as it likes."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio
import uvloop
from websockets.frames import Opcode

from penstock.api.page_guard import PageGuard
from penstock.core.errors import Unauthenticated
from penstock.http.exchange import Exchange
from penstock.http.limits import TICK_S, ClientLimits
from penstock.http.server import Server, bound_socket
from penstock.websocket.endpoint import PATHS, WebSockets
from penstock.websocket.exchange import SocketExchange
from penstock.websocket.session import Session
from penstock.websocket.settings import WebSocketSettings
from penstock.websocket.socket import WebSocket
from tests.clocks import ManualClock
from tests.waiting import eventually_async
from tests.websocket.peer import Peer

EVENTS = b"content-type: text/event-stream\r\n"
ORIGIN = "https://chat.example"
NO_KEY = {"authorization": ""}


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], Any]]:
    return {"uvloop": uvloop.new_event_loop}


class Watching:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def client_gone(self) -> None:
        self.seen.append("gone")

    def pause(self) -> None:
        self.seen.append("pause")

    def resume(self) -> None:
        self.seen.append("resume")


class Stand:
    """A server whose tenants' keys are their names."""

    def __init__(self, clock: ManualClock, settings: WebSocketSettings, limits: ClientLimits) -> None:
        self.clock = clock
        self.exchanges: list[Exchange] = []
        pages = PageGuard("127.0.0.1", allowed_origins=[ORIGIN])
        self.sockets = WebSockets(self._serve, self._admit, pages, settings)
        self.server = Server(self.sockets, limits, clock, upgrades=PATHS)
        self.port = 0

    async def listen(self) -> None:
        listener = bound_socket("127.0.0.1", 0)
        await self.server.listen(listener)
        self.port = listener.getsockname()[1]

    async def peer(self, **options: Any) -> Peer:
        return await Peer.connect(self.port, **{"authorization": "Bearer one"} | options)

    async def exchange(self, number: int = 0) -> Exchange:
        found = await eventually_async(lambda: self.exchanges, lambda found: len(found) > number)
        return found[number]

    async def stream(self, number: int = 0) -> tuple[Exchange, Watching]:
        """The answer to this request has begun."""
        exchange, watching = await self.exchange(number), Watching()
        exchange.watcher = watching
        exchange.start(200, EVENTS)
        return exchange, watching

    def tick(self, seconds: float = TICK_S) -> None:
        self.clock.advance(seconds)

    def _serve(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    @staticmethod
    def _admit(headers: Mapping[bytes, bytes], peer: str) -> str:
        key = headers.get(b"authorization", b"").removeprefix(b"Bearer ").decode()
        if not key:
            raise Unauthenticated("a key is needed")
        if key not in ("one", "two"):
            raise Unauthenticated("this key is not known")
        assert peer == "127.0.0.1"
        return key


@pytest_asyncio.fixture
async def stand() -> AsyncIterator[Callable[..., Any]]:
    stands: list[Stand] = []

    async def start(limits: ClientLimits | None = None, **settings: Any) -> Stand:
        found = Stand(ManualClock(), WebSocketSettings(**settings), limits or ClientLimits())
        stands.append(found)
        await found.listen()
        return found

    yield start
    for one in stands:
        await one.server.stop(0.0)
        assert one.server.num_connections == 0
        assert one.sockets._sessions == set()
        assert not one.sockets._num_of
        assert one.server.bodies.held_bytes == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


Start = Callable[..., Any]

# -- the handshake


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 101),
        ({"origin": ORIGIN}, 101),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"authorization": "Bearer nobody"}, 401),
        ({"sec_websocket_version": "12"}, 426),
        ({"sec_websocket_key": "short"}, 400),
        ({"protocols": ["graphql-ws"]}, 400),
        ({"upgrade": "h2c"}, 400),
        ({"content_length": "5"}, 400),
    ],
)
async def test_handshakes_are_taken_or_refused_with_a_typed_error(
    stand: Start, headers: dict[str, Any], status: int
) -> None:
    server = await stand()
    peer = await server.peer(**headers)
    assert peer.status == status
    if status != 101:
        assert peer.error["message"]
        await peer.ended()
    if status == 426:
        assert peer.response.headers["sec-websocket-version"] == "13"
    peer.writer.close()


async def test_a_page_of_the_servers_own_origin_may_connect(stand: Start) -> None:
    server = await stand()
    peer = await server.peer(origin=f"http://127.0.0.1:{server.port}")
    assert peer.status == 101
    peer.writer.close()


async def test_a_key_comes_as_a_header_a_subprotocol_or_the_first_message(stand: Start) -> None:
    server = await stand()
    offered = await server.peer(**NO_KEY, protocols=["penstock.v1", "bearer.two"])
    assert (offered.status, offered.protocol.subprotocol) == (101, "penstock.v1")
    alone = await server.peer(**NO_KEY, protocols=["openai-insecure-api-key.two"])
    assert (alone.status, alone.protocol.subprotocol) == (101, None)
    assert (await server.peer(**NO_KEY, protocols=["penstock.v1", "bearer.nobody"])).status == 401
    said = await server.peer(**NO_KEY)
    said.send(type="auth", key="two")
    assert await said.receive() == {"type": "authenticated"}
    for peer in (offered, said):
        peer.ask("a")
    for number in range(2):
        headers = (await server.exchange(number)).request.headers
        assert headers[b"authorization"] == b"Bearer two"
        assert not any(name.startswith(b"sec-websocket") or name == b"upgrade" for name in headers)
    said.send(type="auth", key="one")
    assert (await said.receive())["error"]["code"] == "conflict"
    for peer in (offered, alone, said):
        peer.writer.close()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "auth", "key": "nobody"},
        {"type": "auth"},
        {"type": "request", "id": "a", "body": {}},
        {"type": "x"},
        [],
    ],
)
async def test_a_first_message_without_a_good_key_ends_the_socket(stand: Start, message: object) -> None:
    server = await stand()
    peer = await server.peer(**NO_KEY)
    peer.protocol.send_text(str(message).replace("'", '"').encode())
    peer.flush()
    assert (await peer.receive())["status"] in (400, 401)
    assert (await peer.closed())[0] == 1008
    assert not server.exchanges


async def test_sockets_without_a_key_are_few_and_their_messages_short(stand: Start) -> None:
    server = await stand(max_sockets=8)
    peers = [await server.peer(**NO_KEY) for _ in range(2)]
    refused = await server.peer(**NO_KEY)
    assert (refused.status, refused.error["reason"]) == (503, "sockets")
    peers[0].send(type="auth", key="x" * 20_000)
    assert (await peers[0].closed())[0] == 1009
    peers[1].send(type="auth", key="one")
    assert await peers[1].receive() == {"type": "authenticated"}
    peers[1].send(type="request", id="a", body={"text": "x" * 20_000})
    await server.exchange()
    peers[1].writer.close()


async def test_a_socket_without_a_key_is_closed_in_time(stand: Start) -> None:
    server = await stand(auth_timeout_s=5.0)
    peer = await server.peer(**NO_KEY)
    server.tick(5.0 + TICK_S)
    assert await peer.closed() == (1008, "no key came")


async def test_sockets_of_a_tenant_and_of_the_process_are_bounded(stand: Start) -> None:
    server = await stand(max_sockets=3, max_sockets_per_tenant=2)
    peers = [await server.peer() for _ in range(2)]
    refused = await server.peer()
    assert (refused.status, refused.error["reason"]) == (429, "sockets")
    assert refused.response.headers["retry-after"] == "5"
    late = await server.peer(**NO_KEY)
    late.send(type="auth", key="one")
    assert (await late.receive())["error"]["reason"] == "sockets"
    assert (await late.closed())[0] == 1008
    peers.append(await server.peer(authorization="Bearer two"))
    assert (await server.peer(authorization="Bearer two")).status == 503
    for peer in peers:
        peer.writer.close()


async def test_a_handshake_behind_a_request_that_is_not_answered_is_refused(stand: Start) -> None:
    server = await stand()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    upgrade = b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    writer.write(request + upgrade)
    exchange = await server.exchange()
    exchange.respond(200, b"", b"first")
    answer = await reader.read()
    assert b"first" in answer
    assert b"HTTP/1.1 400" in answer
    writer.close()


async def test_what_a_client_sends_with_its_handshake_is_read(stand: Start) -> None:
    server = await stand()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: WebSocket\r\n"
    head += b"authorization: Bearer one\r\nx-penstock: envelope\r\nsec-websocket-version: 13\r\n"
    head += b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    said = b'{"type":"response.create","model":"m"}'
    frame = b"\x81" + bytes((0x80 | len(said),)) + b"\x00" * 4 + said
    writer.write(head + frame[:20])
    answer = await reader.readuntil(b"\r\n\r\n")
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in answer  # RFC 6455's own example
    writer.write(frame[20:])
    exchange = await server.exchange()
    assert exchange.request.body == b'{"model":"m","stream":true}'
    assert b"x-penstock" not in exchange.request.headers
    writer.close()


# -- requests


async def test_requests_of_a_socket_run_side_by_side(stand: Start) -> None:
    server = await stand()
    peer = await server.peer()
    peer.ask("a", headers={"X-Penstock-Max-Wait": "3"})
    peer.ask("b")
    first, second = await server.exchange(0), await server.exchange(1)
    assert first.request.method == b"POST"
    assert first.request.body == b'{"model": "m"}'
    assert first.request.headers[b"x-penstock-max-wait"] == b"3"
    first.start(200, EVENTS + b"x-request-id: 7\r\n")
    second.respond(200, b"content-type: application/json\r\n", b'{"whole": true}')
    first.write(b': waiting in line\n\ndata: {"n":1}\n\ndata: {"n"')
    first.write(b":2}\r\n\r\ndata: [DONE]\n\n", is_last=True)
    assert [await peer.receive() for _ in range(6)] == [
        {"type": "started", "id": "a", "headers": {"x-request-id": "7"}},
        {"type": "response", "id": "b", "headers": {}, "body": {"whole": True}},
        {"type": "waiting", "id": "a", "message": "waiting in line"},
        {"type": "chunk", "id": "a", "data": {"n": 1}},
        {"type": "chunk", "id": "a", "data": {"n": 2}},
        {"type": "done", "id": "a"},
    ]
    peer.ask("a")  # the id is free again
    await server.exchange(2)
    peer.writer.close()


async def test_errors_of_requests_have_their_id_and_those_of_messages_have_none(stand: Start) -> None:
    server = await stand(max_requests=3)
    peer = await server.peer()
    for name in "abc":
        peer.ask(name)
    peer.ask("d")
    full = await peer.receive()
    assert (full["id"], full["status"], full["error"]["reason"], full["retry_after"]) == (
        "d",
        429,
        "socket_requests",
        1,
    )
    a, b, c = [await server.exchange(number) for number in range(3)]
    headers = b"retry-after: 4\r\ncontent-type: application/json\r\n"
    a.respond(429, headers, b'{"error":{"code":"rate_limited","message":"slow"}}')
    limited = await peer.receive()
    assert (limited["id"], limited["retry_after"], limited["error"]["code"]) == ("a", 4, "rate_limited")
    b.start(200, EVENTS)
    b.write(b'data: {"error":{"code":"engine_failed"}}\n\n', is_last=True)
    assert [(await peer.receive())["type"] for _ in range(2)] == ["started", "error"]
    c.start(200, EVENTS)
    c.abort()
    broken = [await peer.receive() for _ in range(2)][1]
    assert (broken["id"], broken["error"]["code"]) == ("c", "engine_failed")
    peer.ask("e")
    (await server.exchange(3)).respond(502, b"content-type: text/html\r\n", b"<html>")
    assert (await peer.receive())["status"] == 502
    wrong: dict[str, tuple[object, str | None, str | None]] = {
        "no JSON": ("{", None, "type"),
        "no object": ("[1]", None, "type"),
        "no type": ({"id": "x"}, None, "type"),
        "an unknown type": ({"type": "response.create", "id": "x"}, None, "type"),
        "no body": ({"type": "request", "id": "x"}, "x", "body"),
        "no id": ({"type": "request", "body": {}}, None, "id"),
        "a field too many": ({"type": "request", "id": "x", "body": {}, "boddy": 1}, "x", "boddy"),
        "a header that is not for it": (
            {"type": "request", "id": "x", "body": {}, "headers": {"host": "y"}},
            "x",
            "headers",
        ),
        "cancel of nothing": ({"type": "cancel", "id": "x"}, None, "id"),
    }
    for name, (message, request_id, param) in wrong.items():
        if isinstance(message, str):
            peer.protocol.send_text(message.encode())
            peer.flush()
        else:
            peer.send(message)
        refused = await peer.receive()
        assert (refused["type"], refused.get("id"), refused["error"]["param"]) == ("error", request_id, param), name
    peer.ask("f")
    peer.ask("f")
    twice = await peer.receive()
    assert ("id" in twice, twice["error"]["code"]) == (False, "conflict")
    peer.writer.close()


async def test_cancel_ends_the_work_of_one_request_at_once(stand: Start) -> None:
    server = await stand()
    peer = await server.peer()
    peer.ask("a")
    peer.ask("b")
    first, watching = await server.stream(0)
    second, other = await server.stream(1)
    peer.send(type="cancel", id="a")
    assert [(await peer.receive())["type"] for _ in range(3)] == ["started", "started", "cancelled"]
    assert (watching.seen, other.seen, first.is_open) == (["gone"], [], False)
    first.write(b"data: {}\n\n")  # nobody hears it
    second.write(b'data: {"n":1}\n\n', is_last=True)
    assert [(await peer.receive())["id"] for _ in range(2)] == ["b", "b"]
    peer.writer.close()


async def test_a_client_that_goes_away_ends_all_its_work(stand: Start) -> None:
    server = await stand()
    peer = await server.peer()
    watchings = []
    for number, name in enumerate("ab"):
        peer.ask(name)
        watchings.append((await server.stream(number))[1])
    peer.writer.transport.abort()
    await eventually_async(lambda: [one.seen for one in watchings], lambda seen: seen == [["gone"], ["gone"]])


async def test_a_reader_that_is_slow_pauses_its_streams_and_can_still_cancel(stand: Start) -> None:
    server = await stand(ClientLimits(max_unsent_bytes=16 << 10))
    peer = await server.peer(receive_buffer=64 << 10)
    for name in "ab":
        peer.ask(name)
    (first, one), (second, two) = await server.stream(0), await server.stream(1)
    event = b'data: {"text":"%b"}\n\n' % (b"x" * 4000)
    num_written = 0
    while "pause" not in one.seen:
        first.write(event)
        num_written += 1
        await asyncio.sleep(0)
        assert num_written < 10_000
    assert two.seen == ["pause"]
    peer.send(type="cancel", id="b")
    await eventually_async(lambda: two.seen, lambda seen: seen == ["pause", "gone"])
    peer.ask("c")
    _, late = await server.stream(2)
    server.exchanges[2].write(event)
    assert late.seen == ["pause"]  # it is told once it writes
    messages = [await peer.receive() for _ in range(num_written + 2)]
    assert sum(message["type"] == "chunk" for message in messages) >= num_written - 1
    await eventually_async(lambda: one.seen, lambda seen: seen[-1] == "resume")
    assert second.is_open is False
    peer.writer.close()


async def test_a_client_that_takes_nothing_is_dropped(stand: Start) -> None:
    server = await stand(ClientLimits(max_unsent_bytes=16 << 10, stall_timeout_s=30.0))
    peer = await server.peer(receive_buffer=64 << 10)
    peer.ask("a")
    exchange, watching = await server.stream(0)
    while "pause" not in watching.seen:
        exchange.write(b'data: {"text":"%b"}\n\n' % (b"x" * 4000))
        await asyncio.sleep(0)
    while "gone" not in watching.seen:  # what the kernel still takes is progress
        server.tick(31.0)
        await asyncio.sleep(0)
    peer.writer.close()


async def test_requests_and_sockets_leave_nothing_behind_and_take_no_collector(stand: Start) -> None:
    server = await stand()

    def things() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, SocketExchange | Session | WebSocket)]

    gc.collect()
    others = things()
    peer = await server.peer()
    for name in "abcd":
        peer.ask(name)
    exchanges = [(await server.stream(number))[0] for number in range(4)]
    for exchange in exchanges[:2]:
        exchange.write(b"data: [DONE]\n\n", is_last=True)
    exchanges[2].abort()
    peer.send(type="cancel", id="d")
    while (await peer.receive())["type"] != "cancelled":
        pass
    peer.writer.close()
    await eventually_async(lambda: server.server.num_connections, lambda num_open: num_open == 0)
    server.exchanges.clear()
    del exchange, exchanges
    assert not [one for one in things() if all(one is not other for other in others)]


# -- deadlines and bounds


async def test_a_client_that_says_nothing_is_pinged_and_then_dropped(stand: Start) -> None:
    server = await stand(ping_every_s=20.0, pong_timeout_s=10.0)
    alive, dead = await server.peer(), await server.peer()
    server.tick(20.0 + TICK_S)
    alive.ask("a")  # its first read is a ping, which it answers
    exchange = await server.exchange()
    exchange.respond(200, b"", b"{}")
    assert (await alive.receive())["type"] == "response"
    alive.ask("b")
    await server.exchange(1)
    server.tick(10.0 + TICK_S)
    assert (await dead.closed())[0] == 1006
    server.exchanges[1].respond(200, b"", b"{}")
    assert (await alive.receive())["id"] == "b"
    alive.writer.close()


async def test_an_idle_socket_is_closed_and_one_with_a_request_is_not(stand: Start) -> None:
    server = await stand(idle_timeout_s=60.0, ping_every_s=1e6)
    idle, busy = await server.peer(), await server.peer()
    busy.ask("a")
    exchange = await server.exchange()
    server.tick(61.0)
    assert await idle.closed() == (1001, "idle")
    exchange.respond(200, b"", b"{}")
    assert (await busy.receive())["type"] == "response"
    busy.writer.close()


async def test_a_message_that_does_not_arrive_is_not_waited_for(stand: Start) -> None:
    server = await stand(message_timeout_s=5.0, ping_every_s=1e6)
    peer = await server.peer()
    peer.writer.write(b"\x01\x81\x00\x00\x00\x00{")  # the first of its fragments
    peer.ask("a")  # a new message within it
    assert (await peer.closed())[0] == 1002
    peer = await server.peer()
    peer.writer.write(
        b"\x01\x81\x00\x00\x00\x00{\x89\x80\x00\x00\x00\x00"
    )  # with a ping, so that the test sees it read
    await peer._event()
    server.tick(6.0)
    assert (await peer.closed())[0] == 1008


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\x82\x81\x00\x00\x00\x00{", 1003),
        (b"\x81\x81\x00\x00\x00\x00\xff", 1007),
        (b"\x81\x01{", 1002),
        (b"\x81\xff" + struct.pack("!Q", 1 << 40) + b"\x00" * 4, 1009),
        (b"GET / HTTP/1.1\r\n\r\n", 1002),
        (b"\x88\x80\x00\x00\x00\x00", 1005),
    ],
)
async def test_hostile_frames_end_the_socket_with_a_code_and_its_work_too(stand: Start, data: bytes, code: int) -> None:
    server = await stand()
    peer = await server.peer()
    peer.ask("a")
    _, watching = await server.stream(0)
    assert (await peer.receive())["type"] == "started"
    peer.writer.write(data)
    peer.writer.write(b"\x81\x80\x00\x00\x00\x00" * 10)  # nothing of this is heard
    assert (await peer.closed())[0] == code
    assert watching.seen == ["gone"]
    assert len(server.exchanges) == 1


async def test_long_messages_take_room_while_they_arrive(stand: Start) -> None:
    server = await stand(ClientLimits(max_arriving_bytes=100_000), max_message_bytes=60_000)
    peers = [await server.peer() for _ in range(2)]
    beginning = b"\x81\xfe" + struct.pack("!H", 40_000) + b"\x00" * 4 + b" " * 100
    peers[0].writer.write(beginning)
    await eventually_async(lambda: server.server.bodies.held_bytes, lambda held: held == 40_000)
    peers[1].writer.write(beginning)
    assert (await peers[1]._event()).opcode is Opcode.CLOSE
    server.tick(6.0)  # its close frame is part of its message
    assert (await peers[1].closed())[0] == 1013
    peers[0].writer.write(b" " * 39_900)
    assert (await peers[0].receive())["error"]["param"] == "type"
    assert server.server.bodies.held_bytes == 0
    peers[0].writer.close()


async def test_a_server_that_stops_lets_streams_end_and_then_closes(stand: Start) -> None:
    server = await stand()
    busy, idle = await server.peer(), await server.peer()
    busy.ask("a")
    exchange, watching = await server.stream(0)
    stopping = asyncio.ensure_future(server.server.stop(30.0))
    assert await idle.closed() == (1001, "this server is stopping")
    busy.ask("b")
    assert (await busy.receive())["type"] == "started"
    refused = await busy.receive()
    assert (refused["id"], refused["status"], refused["error"]["reason"]) == ("b", 503, "draining")
    exchange.write(b'data: {"n":1}\n\ndata: [DONE]\n\n', is_last=True)
    assert [(await busy.receive())["type"] for _ in range(2)] == ["chunk", "done"]
    assert (await busy.closed())[0] == 1001
    assert await stopping == 0
    assert watching.seen == []


async def test_a_socket_that_comes_while_the_server_stops_is_sent_elsewhere(stand: Start) -> None:
    server = await stand()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await eventually_async(lambda: server.server.num_connections)
    stopping = asyncio.ensure_future(server.server.stop(30.0, idle_grace_s=5.0))
    await asyncio.sleep(0)
    head = b"GET /v1/responses HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    head += b"authorization: Bearer one\r\nsec-websocket-version: 13\r\n"
    writer.write(head + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    assert (await reader.readexactly(4))[2:] == struct.pack("!H", 1001)
    writer.close()
    assert await stopping == 0


# -- responses


async def test_responses_wait_for_those_of_their_lane_and_cancel_by_id(stand: Start) -> None:
    server = await stand()
    peer = await server.peer(path="/v1/responses")
    for lane in ("x", "x", "y", None):
        peer.send({"type": "response.create", "model": "m", "input": "hi"} | ({"stream_id": lane} if lane else {}))
    bodies = [(await server.exchange(number)).request.body for number in range(3)]
    assert bodies == [b'{"model":"m","input":"hi","stream":true}'] * 3
    created = (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"r"}}\n\n'
    )
    server.exchanges[0].start(200, EVENTS, data=created)
    assert await peer.receive() == {
        "type": "response.created",
        "sequence_number": 0,
        "response": {"id": "r"},
        "stream_id": "x",
    }
    peer.send(type="response.cancel", response_id="r")
    assert await peer.receive() == {
        "type": "response.cancelled",
        "sequence_number": 1,
        "response": {"id": "r", "status": "cancelled"},
        "stream_id": "x",
    }
    (await server.exchange(3)).respond(400, b"", b'{"error":{"code":"x"}}')
    assert await peer.receive() == {"type": "error", "stream_id": "x", "status": 400, "error": {"code": "x"}}
    peer.send(type="response.cancel")  # of the lane without a name
    assert (await peer.receive())["type"] == "response.cancelled"
    for name, value in {"background": True, "generate": False, "stream": False, "stream_id": 7}.items():
        peer.send({"type": "response.create", name: value})
        assert (await peer.receive())["error"]["param"] == name
    for kind in ("response.steer", "request"):
        peer.send(type=kind)
        assert (await peer.receive())["error"]["param"] == "type"
    peer.send(type="response.cancel", response_id="nobody's")
    assert (await peer.receive())["error"]["code"] == "not_found"
    peer.writer.close()
