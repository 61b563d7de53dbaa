"""The HTTP server of `penstock serve` and `penstock engine`: what it takes from clients, slow and hostile ones too.

It is the gateway's, so what a connection may do is tested there (`tests/http/test_connection.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
import pytest_asyncio
import uvloop

from penstock.api.asgi import Request, Route, Router
from penstock.api.sink import Sink, SseStream, json_response
from penstock.cli.serve import HttpServer
from penstock.core.clock import MonotonicClock
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient
from penstock.http.limits import ClientLimits
from penstock.server.drain import Drain
from penstock.server.generation import Generation
from tests.clocks import ManualClock
from tests.http.scripted import Client
from tests.waiting import eventually_async

LIMITS = ClientLimits()
POST = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nhello"


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


async def nothing(theirs: socket.socket) -> asyncio.subprocess.Process:
    raise AssertionError("no engine is started")


class Served:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.drain = Drain()
        self.streams: list[str] = []  # how those that began have fared
        routes = [Route("POST", "/echo", self._echo), Route("GET", "/endless", self._endless)]
        settings = ServerSettings(max_body_bytes=1000, drain_timeout_s=600)
        engine = EngineClient(nothing, MonotonicClock())
        self.http = HttpServer(Router(routes), self.drain, engine, None, settings, self.clock)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.serving = asyncio.create_task(self.http.serve(listener))

    @property
    def num_connections(self) -> int:
        return self.http._server.num_connections

    async def _echo(self, request: Request, sink: Sink) -> None:
        await json_response(sink, 200, await request.body(1000), [(b"x-peer", (request.client or "").encode())])

    async def _endless(self, request: Request, sink: Sink) -> None:
        async def push() -> None:
            async with SseStream(sink) as stream:
                while True:
                    await stream.write(b"x" * 10_000)
                    self.streams.append("wrote")
                    await asyncio.sleep(0)

        await request.body(0)
        try:
            await request.while_connected(push())
        finally:
            self.streams.append("ended")


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    await eventually_async(lambda: found.http._server._listeners)
    yield found
    found.http.stop()
    await found.serving


async def test_it_answers_as_the_application_does(served: Served) -> None:
    client = await Client.connect(served.port)
    for _ in range(2):  # the connection is kept
        await client.send(POST)
        answer = await client.response()
        assert (answer.status, answer.body, answer.headers["x-peer"]) == (200, b"hello", "127.0.0.1")
        assert answer.headers["date"].endswith("gmt")
    client.close()


@pytest.mark.parametrize(
    ("sent", "phase", "limit_s"),
    [
        (b"", 0, LIMITS.head_timeout_s),
        (b"POST /echo HTTP/1.1\r\nhost: loc", 1, LIMITS.head_timeout_s),
        (POST[:-2], 2, LIMITS.body_timeout_s),
        (POST, 0, LIMITS.idle_timeout_s),
    ],
    ids=["connected", "half a head", "half a body", "between requests"],
)
async def test_nobody_keeps_a_connection_by_saying_nothing(
    served: Served, sent: bytes, phase: int, limit_s: float
) -> None:
    client = await Client.connect(served.port)
    await client.send(sent)
    await eventually_async(lambda: served.num_connections)
    if sent == POST:
        await client.response()
    (connection,) = served.http._server._connections
    await eventually_async(lambda: connection._phase == phase)
    served.clock.advance(limit_s - 1)
    assert served.num_connections == 1
    served.clock.advance(1.5)
    if connection._refusal is not None:
        answer = await client.response()
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "request_timeout")
    assert await client.ended()


async def test_headers_without_an_end_are_refused_when_they_are_too_large(served: Served) -> None:
    client = await Client.connect(served.port)
    line = b"x: " + b"a" * 1000 + b"\r\n"
    await client.send(b"GET /endless HTTP/1.1\r\n" + line * (LIMITS.max_head_bytes // len(line) + 1))
    answer = await client.response()
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (431, "headers_too_large")
    assert await client.ended()


async def test_bodies_over_the_setting_are_refused_before_they_are_sent(served: Served) -> None:
    client = await Client.connect(served.port)
    await client.send(b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1001\r\n\r\n")
    assert (await client.response()).status == 413
    assert await client.ended()


async def test_a_client_that_stops_reading_a_stream_is_waited_for_and_then_dropped(served: Served) -> None:
    client = await Client.connect(served.port, receive_buffer=4096)
    client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await eventually_async(lambda: served.num_connections)
    (connection,) = served.http._server._connections
    await eventually_async(lambda: connection._is_paused)
    before = len(served.streams)
    assert "ended" not in served.streams
    served.clock.advance(LIMITS.stall_timeout_s + 1)  # what the kernel still took counts
    served.clock.advance(LIMITS.stall_timeout_s + 1)
    await eventually_async(lambda: served.streams[-1] == "ended")
    assert len(served.streams) <= before + 2
    await eventually_async(lambda: served.num_connections == 0)
    client.reset()


async def test_an_application_hears_that_its_client_has_gone(served: Served) -> None:
    client = await Client.connect(served.port)
    await client.send(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await eventually_async(lambda: served.streams)
    client.reset()
    await eventually_async(lambda: served.streams[-1] == "ended")


async def test_a_signal_lets_what_has_begun_finish(served: Served) -> None:
    client = await Client.connect(served.port)
    await client.send(POST[:-2])
    await eventually_async(lambda: [one._phase for one in served.http._server._connections] == [2])
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually_async(lambda: served.drain.is_stopping)
    await client.send(POST[-2:])
    assert (await client.response()).body == b"hello"
    assert await client.ended()
    await served.serving


async def test_a_server_that_stops_listens_until_what_runs_has_ended(served: Served) -> None:
    """Gateways ask it for streams that can go on elsewhere."""
    with served.drain.admit(cast(Generation, object()), "id"):
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually_async(lambda: served.drain.is_stopping)
        client = await Client.connect(served.port)
        await client.send(POST)
        assert (await client.response()).body == b"hello"
        assert not served.drain.is_over
    assert served.drain.is_over
    assert await client.ended()
    await served.serving
