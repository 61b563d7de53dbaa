"""Bodies that come in more than one read: whose they are, how much room they take, and what comes after them."""

import gc
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError, Unauthenticated
from penstock.http.bodies import BodyBudget
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from tests.http.scripted import Client
from tests.http.test_connection import POST, echo, error_of
from tests.waiting import eventually_async

CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\nauthorization: good\r\ntransfer-encoding: chunked\r\n\r\n"


def head(owner: str, num_bytes: int, more: str = "", path: str = "/echo") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\nx-owner: {owner}\r\n{more}content-length: {num_bytes}\r\n\r\n".encode()


class Gate:
    """Everybody says who they are, but for `nobody`, who is refused; and `/none` takes no body."""

    def body_owner(self, head: Request) -> str | None:
        owner = head.headers.get(b"x-owner", b"").decode()
        if owner == "nobody":
            raise Unauthenticated("who are you?")
        return None if head.path == b"/none" else owner

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        exchange.refuse(error)


async def started(client: Client, sent: bytes) -> None:
    """Sends part of a request; returns when the server asks for more of it."""
    await client.send(sent)
    assert (await client.response()).status == 100


async def test_trailers_change_nothing_of_the_head(serve):
    seen: list[Request] = []
    _, connect = await serve(lambda exchange: (seen.append(exchange.request), echo(exchange)))
    client = await connect()
    await client.send(CHUNKED + b"2\r\nhi\r\n0\r\nhost: evil\r\nauthorization: bad\r\nx-new: 1\r\n\r\n" + POST)
    assert (await client.response()).body == b"/echo|hi"
    assert seen[0].headers == {b"host": b"x", b"authorization": b"good", b"transfer-encoding": b"chunked"}
    assert (await client.response()).body == b"/echo|hello"


@pytest.mark.parametrize(
    "trailers",
    [b"x: y\r\n" * 100, b"x: " + b"y" * 3000 + b"\r\n", b"x: " + b"y" * 5000, b"x" * 5000],
    ids=["many", "long", "an endless value", "an endless name"],
)
async def test_trailers_are_bounded_as_headers_are(serve, trailers):
    server, connect = await serve(echo, max_head_bytes=2000)
    client = await connect()
    await client.send(CHUNKED + b"2\r\nhi\r\n0\r\n", *(trailers[at : at + 500] for at in range(0, len(trailers), 500)))
    response = await client.response()
    assert (response.status, error_of(response.body)) == (431, "headers_too_large")
    assert await client.ended()
    assert server.bodies.held_bytes == 0


async def test_chunks_of_two_bytes_take_no_more_room_than_one(serve):
    server, connect = await serve(echo)
    client = await connect()
    await client.send(CHUNKED)
    num_chunks = 50_000
    tracemalloc.start()
    try:
        await client.send(b"2\r\nab\r\n" * num_chunks)
        (connection,) = server._connections
        await eventually_async(lambda: connection._body_bytes, lambda num_read: num_read == 2 * num_chunks)
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 10 * 2 * num_chunks  # a list of them has twenty times as much
    await client.send(b"0\r\n\r\n")
    assert (await client.response()).body == b"/echo|" + b"ab" * num_chunks


@pytest.mark.parametrize("expects", [True, False])
async def test_unwanted_body_is_refused_by_its_head_and_not_read(serve, clock, expects):
    server, connect = await serve(echo, gate=Gate())
    client = await connect()
    await client.send(head("nobody", 5_000_000, "expect: 100-continue\r\n" if expects else ""))
    response = await client.response()  # and no 100 before it
    assert (response.status, error_of(response.body)) == (401, "unauthenticated")
    assert response.headers["connection"] == "close"
    await client.send(b"x" * 5_000_000)  # it is thrown away: the client can send it all, and read its answer
    assert await client.ended()
    clock.advance(3.0)
    await eventually_async(lambda: server.num_connections, lambda num_open: num_open == 0)


async def test_refusal_of_a_body_comes_after_the_answers_before_it(serve):
    waiting: list[Exchange] = []
    server, connect = await serve(waiting.append, gate=Gate())
    client = await connect()
    await client.send(head("a", 2) + b"ok" + head("nobody", 5_000_000) + b"x" * 1000)
    await eventually_async(lambda: waiting)
    (connection,) = server._connections
    await eventually_async(lambda: not connection._is_reading)  # nor is it read before its turn
    waiting[0].respond(200, b"", b"first")
    assert (await client.response()).body == b"first"
    assert (await client.response()).status == 401
    assert len(waiting) == 1


async def test_body_of_a_pipelined_request_is_read_when_its_turn_comes(serve):
    waiting: list[Exchange] = []
    server, connect = await serve(waiting.append, gate=Gate())
    client = await connect()
    await client.send(head("a", 2) + b"ok" + head("a", 5, "expect: 100-continue\r\n") + b"hel")
    await eventually_async(lambda: waiting)
    assert server.bodies.held_bytes == 0
    waiting.pop().respond(200, b"", b"first")
    assert (await client.response()).body == b"first"
    assert (await client.response()).status == 100
    assert server.bodies.held_bytes == 5
    await client.send(b"lo")
    await eventually_async(lambda: waiting)
    assert waiting[0].request.body == b"hello"
    assert server.bodies.held_bytes == 0


async def test_path_without_use_for_a_body_is_answered_without_it(serve):
    _, connect = await serve(echo, gate=Gate())
    client = await connect()
    await client.send(head("a", 1000, "expect: 100-continue\r\n", path="/none"))
    response = await client.response()
    assert (response.status, response.body, response.headers["connection"]) == (200, b"/none|", "close")


async def test_bodies_share_the_room_and_one_owner_does_not_get_it_all(serve):
    server, connect = await serve(echo, gate=Gate(), max_arriving_bytes=1000)
    expecting = "expect: 100-continue\r\n"
    first, second, third, other = [await connect() for _ in range(4)]
    await started(first, head("a", 300, expecting))
    await started(second, head("a", 200, expecting))
    await third.send(head("a", 100, expecting))  # 600 of 1000, and 500 are free
    response = await third.response()
    assert (response.status, error_of(response.body)) == (503, "buffers_full")
    assert response.headers["retry-after"] == "2"
    await started(other, head("b", 250, expecting))
    assert server.bodies.held_bytes == 750
    await first.send(b"x" * 300)
    assert (await first.response()).status == 200
    second.reset()
    await eventually_async(lambda: server.bodies.held_bytes, lambda held: held == 250)
    await other.send(b"y" * 250)
    assert (await other.response()).body == b"/echo|" + b"y" * 250
    assert server.bodies.held_bytes == 0


async def test_body_without_a_length_takes_room_as_it_comes(serve, clock):
    server, connect = await serve(echo, max_arriving_bytes=1000, body_timeout_s=3.0)
    client, late = await connect(), await connect()
    await late.send(CHUNKED + b"64\r\n" + b"x" * 50)
    await eventually_async(lambda: server.bodies.held_bytes, lambda held: held == 100)
    await client.send(CHUNKED + b"12c\r\n" + b"x" * 300)
    response = await client.response()
    assert (response.status, error_of(response.body)) == (503, "buffers_full")
    clock.advance(3.25)
    assert (await late.response()).status == 408
    assert server.bodies.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=40))
def test_somebody_new_always_finds_room(steps):
    budget, held = BodyBudget(100), []
    for owner, num_bytes, gives_back in steps:
        if budget.reserve(owner, num_bytes):
            held.append((owner, num_bytes))
        if gives_back and held:
            budget.release(*held.pop(0))
        assert budget.held_bytes == sum(size for _, size in held)
        assert all(sum(size for who, size in held if who == one) <= 50 for one in "abc")
    assert budget.reserve("new", (100 - budget.held_bytes) // 2)
    assert budget.held_bytes < 100
