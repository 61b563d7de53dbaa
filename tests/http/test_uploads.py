"""Bodies that are taken piece by piece, as they arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core.errors import InvalidRequest, Unauthenticated
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from tests.http.test_connection import POST, error_of
from tests.waiting import eventually_async

CHUNKED = b"POST /files HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def head(num_bytes: int, more: str = "") -> bytes:
    return f"POST /files?x=1 HTTP/1.1\r\nhost: x\r\n{more}content-length: {num_bytes}\r\n\r\n".encode()


class Taker:
    """Counts what comes, and has enough whenever a test says so."""

    max_bytes = 100_000

    def __init__(self, resume: Callable[[], None]) -> None:
        self.resume = resume
        self.num_bytes = 0
        self.is_full = False
        self.is_lost = False

    def write(self, data: bytes) -> None:
        if b"!" in data:
            raise InvalidRequest("no exclamation marks")
        self.num_bytes += len(data)

    def lost(self) -> None:
        self.is_lost = True


class Takers:
    paths = frozenset((b"/files",))

    def __init__(self) -> None:
        self.opened: list[Taker] = []

    def open(self, head: Request, resume: Callable[[], None]) -> Taker:
        if b"x-nobody" in head.headers:
            raise Unauthenticated("who are you?")
        self.opened.append(Taker(resume))
        return self.opened[-1]


def answer(exchange: Exchange) -> None:
    upload, body = exchange.request.upload, exchange.request.body
    exchange.respond(200, b"", b"%d taken" % upload.num_bytes if isinstance(upload, Taker) else b"%d held" % len(body))


@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_is_taken_as_it_comes_and_others_after_it_are_held(serve, is_chunked):
    takers = Takers()
    _, connect = await serve(answer, uploads=takers, max_body_bytes=1000)
    client = await connect()
    if is_chunked:
        await client.send(CHUNKED, *[b"2710\r\n" + b"x" * 10_000 + b"\r\n"] * 5, b"0\r\n\r\n")
    else:
        await client.send(head(50_000), *[b"x" * 10_000] * 5)
    assert (await client.response()).body == b"50000 taken"
    await client.send(POST)
    assert (await client.response()).body == b"5 held"
    assert [taker.is_lost for taker in takers.opened] == [False]


async def test_a_taker_that_has_enough_is_waited_for(serve, clock):
    takers = Takers()
    server, connect = await serve(answer, uploads=takers)
    client = await connect()
    await client.send(head(20, "expect: 100-continue\r\n"))
    assert (await client.response()).status == 100
    (taker,), (connection,) = takers.opened, server._connections
    taker.is_full = True
    await client.send(b"x" * 10)
    await eventually_async(lambda: connection._is_reading, lambda is_reading: not is_reading)
    clock.advance(1000.0)  # it is not the client who is slow
    await client.send(b"x" * 10)
    taker.is_full = False
    taker.resume()
    assert (await client.response()).body == b"20 taken"


async def test_what_is_wrong_is_told_before_the_rest_has_come(serve):
    takers = Takers()
    _, connect = await serve(answer, uploads=takers)
    for sent, told in (
        (head(100, "x-nobody: 1\r\n"), (401, "unauthenticated")),
        (head(100_001), (413, "body_too_large")),
        (CHUNKED + b"186a1\r\n" + b"x" * 100_001, (413, "body_too_large")),
        (head(1000) + b"x!", (400, "invalid_request")),
    ):
        client = await connect()
        await client.send(sent)
        response = await client.response()
        assert (response.status, error_of(response.body)) == told
        assert await client.ended()
    assert [taker.is_lost for taker in takers.opened] == [True, True, True]


async def test_a_client_that_leaves_or_is_slow_has_its_upload_given_up(serve, clock):
    takers = Takers()
    _, connect = await serve(answer, uploads=takers, body_timeout_s=60.0)
    gone, slow = await connect(), await connect()
    await gone.send(head(100) + b"x")
    await eventually_async(lambda: len(takers.opened) == 1 and takers.opened[0].num_bytes)
    gone.reset()
    await eventually_async(lambda: takers.opened[0].is_lost)
    await slow.send(head(100) + b"x")
    await eventually_async(lambda: len(takers.opened) == 2 and takers.opened[1].num_bytes)
    clock.advance(61.0)
    assert (await slow.response()).status == 408
    assert takers.opened[1].is_lost
