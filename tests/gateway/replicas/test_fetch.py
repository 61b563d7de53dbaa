"""One document from a server, whatever the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.dialects.liveness import Answer
from penstock.gateway.replicas.fetch import fetch
from penstock.http.call import Failure, FailureKind
from penstock.http.upstream import Upstream
from tests.clocks import ManualClock
from tests.http.scripted import ScriptedUpstream, Stream
from tests.waiting import eventually_async


async def asked(script: Callable[[Stream], Awaitable[None]], **options: object) -> Answer | Failure:
    server = await ScriptedUpstream.start(script)
    upstream = Upstream("127.0.0.1", server.port)
    try:
        given = {"timeout_s": 60.0} | options
        return await fetch(upstream, b"/document", b"x-name: value\r\n", **given)  # type: ignore[arg-type]
    finally:
        assert upstream.num_open <= 1
        upstream.close()
        await server.stop()


async def test_what_it_says_is_handed_over_whole() -> None:
    async def script(stream: Stream) -> None:
        assert (await stream.head()).startswith(b"GET /document HTTP/1.1\r\n")
        await stream.send(b"HTTP/1.1 418 Teapot\r\ncontent-length: 6\r\netag: 7\r\n\r\nabc", b"def", gap_s=0.001)

    found = await asked(script)
    assert isinstance(found, Answer)
    assert (found.status, found.headers[b"etag"], found.body) == (418, b"7", b"abcdef")


async def test_a_body_is_posted() -> None:
    async def script(stream: Stream) -> None:
        head = await stream.head()
        assert head.startswith(b"POST /document HTTP/1.1\r\n")
        assert await stream.reader.readexactly(4) == b"body"
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    assert await asked(script, body=b"body") == Answer(200, {b"content-length": b"0"}, b"")


@pytest.mark.parametrize("framing", [b"content-length: 1000", b"transfer-encoding: chunked"])
async def test_more_than_it_may_say_is_not_listened_to(framing: bytes) -> None:
    async def script(stream: Stream) -> None:
        await stream.head()
        await stream.send(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n" % framing)
        while True:
            await stream.send(b"3e8\r\n%b\r\n" % (b"x" * 1000) if b"chunked" in framing else b"x" * 1000)
            await asyncio.sleep(0.001)

    found = await asked(script, most_bytes=999)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.MALFORMED


async def test_who_dawdles_is_left_in_time() -> None:
    async def script(stream: Stream) -> None:
        await stream.head()
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while clock.now_s < 2000.0:
            clock.advance(1.0)
            await stream.send(b"x")
            await asyncio.sleep(0)

    server = await ScriptedUpstream.start(script)
    clock = ManualClock()
    upstream = Upstream("127.0.0.1", server.port, clock=clock)
    began_s = clock.now()
    found = await fetch(upstream, b"/document", b"", timeout_s=30.0)
    assert isinstance(found, Failure)
    assert "30 s" in found.message
    assert clock.now() - began_s < 40.0
    await eventually_async(lambda: server.num_lost, lambda num_lost: num_lost == 1)  # the connection went with it
    await server.stop()


async def test_nobody_there_is_a_failure_too() -> None:
    server = await ScriptedUpstream.start(lambda stream: asyncio.sleep(0))
    await server.stop()
    found = await fetch(Upstream("127.0.0.1", server.port), b"/", b"", timeout_s=60.0)
    assert isinstance(found, Failure)
    assert found.kind is FailureKind.REFUSED
