import asyncio
import json
import socket
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import Overloaded
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.http.server import Server
from tests.http.scripted import Client
from tests.waiting import eventually_async

POST = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\n\r\n"


def echo(exchange: Exchange) -> None:
    request = exchange.request
    exchange.respond(200, b"x-method: %b\r\n" % request.method, request.target + b"|" + request.body)


async def received(server: Server, sent: bytes) -> None:
    """Once the server's one connection has read that much of a request."""
    (connection,) = server._connections
    head, end, body = sent.partition(b"\r\n\r\n")

    def num_bytes() -> int:
        return connection._body_bytes if end else connection._unparsed_bytes

    await eventually_async(num_bytes, lambda num_read: num_read == len(body if end else head))


def error_of(body: bytes) -> str:
    return json.loads(body)["error"]["code"]


async def test_request_reaches_the_app_as_it_was_sent(serve):
    seen: list[Request] = []
    _, connect = await serve(lambda exchange: (seen.append(exchange.request), echo(exchange)))
    client = await connect()
    await client.send(
        b"POST /a?b=c HTTP/1.1\r\nHost: x\r\nX-Thing: One\r\nx-thing: Two\r\ncontent-length: 3\r\n\r\n\x00\xff{"
    )
    response = await client.response()
    assert (response.status, response.body) == (200, b"/a?b=c|\x00\xff{")
    request = seen[0]
    assert (request.method, request.path, request.query, request.body) == (b"POST", b"/a", b"b=c", b"\x00\xff{")
    assert request.headers == {b"host": b"x", b"x-thing": b"Two", b"content-length": b"3"}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 200), max_size=12), chunked=st.booleans(), num_requests=st.integers(1, 3))
async def test_any_split_of_the_bytes_is_the_same_request(serve, cuts, chunked, num_requests):
    _, connect = await serve(echo)
    client = await connect()
    sent = (CHUNKED if chunked else POST) * num_requests
    edges = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    await client.send(*(sent[start:end] for start, end in pairwise(edges)))
    for _ in range(num_requests):
        response = await client.response()
        assert (response.status, response.headers["x-method"], response.body) == (200, "post", b"/echo|hello")
    client.close()


async def test_one_byte_at_a_time(serve):
    _, connect = await serve(echo)
    client = await connect()
    await client.send(*(CHUNKED[i : i + 1] for i in range(len(CHUNKED))))
    assert (await client.response()).body == b"/echo|hello"


async def test_pipelined_requests_are_answered_in_order_whatever_finishes_first(serve):
    waiting: list[Exchange] = []
    _, connect = await serve(waiting.append)
    client = await connect()
    await client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(3)))
    for number in range(3):
        await eventually_async(lambda: waiting)  # all have been read then: they came in one piece
        assert [exchange.request.path for exchange in waiting] == [b"/%d" % number]  # the next waits its turn
        waiting.pop().respond(200, b"", b"answer %d" % number)
        assert (await client.response()).body == b"answer %d" % number


async def test_thousands_of_pipelined_requests_in_one_read(serve):
    _, connect = await serve(echo)
    client = await connect()
    sending = asyncio.create_task(client.send(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n" * 5000))
    for _ in range(5000):
        assert (await client.response()).body == b"/x|"
    await sending


async def test_garbage_after_a_good_request_is_refused_after_its_answer(serve):
    waiting: list[Exchange] = []
    _, connect = await serve(waiting.append)
    client = await connect()
    await client.send(b"GET /good HTTP/1.1\r\nhost: x\r\n\r\nNONSENSE\r\n\r\n")
    await eventually_async(lambda: waiting)
    waiting[0].respond(200, b"", b"fine")
    assert (await client.response()).body == b"fine"
    assert (await client.response()).status == 400
    assert await client.ended()


@pytest.mark.parametrize(
    "sent",
    [
        b"NONSENSE / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: nine\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no host
        b"GET / HTTP/1.1\r\nhost: x\r\nHost: x\r\n\r\n",  # two
        b"GET / HTTP/1.1\r\nhost: x\r\nx: a\r\n folded\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_wrong_requests_get_a_typed_answer_and_reach_nobody(serve, sent):
    seen: list[Exchange] = []
    _, connect = await serve(seen.append)
    client = await connect()
    await client.send(sent)
    response = await client.response()
    assert (response.status, error_of(response.body)) == (400, "invalid_request")
    assert response.headers["connection"] == "close"
    assert await client.ended()
    assert not seen


async def test_declared_body_over_the_limit_is_refused_before_it_is_sent(serve):
    _, connect = await serve(echo, max_body_bytes=100)
    client = await connect()
    await client.send(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 101\r\n\r\n")
    response = await client.response()
    assert (response.status, error_of(response.body)) == (413, "body_too_large")
    assert await client.ended()


async def test_client_that_is_still_sending_can_read_why_it_was_refused(serve):
    _, connect = await serve(echo, max_body_bytes=100)
    client = await connect()
    client.writer.write(
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"
    )
    await eventually_async(lambda: client.reader._buffer)  # it has been refused
    client.writer.write(b"ffff\r\n" + b"x" * 0xFFFF)
    response = await client.response()
    assert (response.status, error_of(response.body)) == (413, "body_too_large")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 100 + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x" * 5000,  # never ends
    ],
)
async def test_large_heads_are_refused(serve, head):
    _, connect = await serve(echo, max_head_bytes=2000)
    client = await connect()
    await client.send(head[:700], head[700:])
    response = await client.response()
    assert (response.status, error_of(response.body)) == (431, "headers_too_large")
    assert await client.ended()


async def test_expect_continue_is_answered_when_the_body_is_wanted(serve):
    _, connect = await serve(echo)
    client = await connect()
    await client.send(b"POST /e HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
    assert (await client.response()).status == 100
    await client.send(b"ok")
    assert (await client.response()).body == b"/e|ok"


async def test_head_gets_the_head_alone(serve):
    _, connect = await serve(echo)
    client = await connect()
    await client.send(b"HEAD /h HTTP/1.1\r\nhost: x\r\n\r\n" + POST)
    response = await client.response(to_head=True)
    assert (response.status, response.headers["content-length"]) == (200, "3")
    assert (await client.response()).body == b"/echo|hello"


@pytest.mark.parametrize(
    ("sent", "keeps"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", True),
    ],
)
async def test_connection_is_kept_as_the_client_asks(serve, sent, keeps):
    _, connect = await serve(echo)
    client = await connect()
    await client.send(sent)
    assert (await client.response()).body == b"/|"
    if keeps:
        await client.send(sent)
        assert (await client.response()).body == b"/|"
    else:
        assert await client.ended()


async def test_streams_are_chunked_for_new_clients_and_closed_for_old_ones(serve):
    def stream(exchange: Exchange) -> None:
        exchange.start(200, b"")
        exchange.write(b"one ")
        exchange.write(b"")
        exchange.write(b"two", is_last=True)
        exchange.write(b"ignored")

    _, connect = await serve(stream)
    client = await connect()
    await client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    response = await client.response()
    assert (response.headers, response.body) == ({"transfer-encoding": "chunked"}, b"one two")
    old = await connect()
    await old.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    response = await old.response()
    assert (response.headers, response.body) == ({"connection": "close"}, b"one two")


async def test_errors_of_the_app_are_answers(serve):
    def app(exchange: Exchange) -> None:
        if exchange.request.path == b"/busy":
            raise Overloaded("not now", retry_after_s=3.2)
        raise RuntimeError("a secret")

    _, connect = await serve(app)
    client = await connect()
    await client.send(b"GET /busy HTTP/1.1\r\nhost: x\r\n\r\n")
    response = await client.response()
    assert (response.status, response.headers["retry-after"], error_of(response.body)) == (429, "4", "overloaded")
    await client.send(b"GET /bug HTTP/1.1\r\nhost: x\r\n\r\n")
    response = await client.response()
    assert (response.status, error_of(response.body)) == (500, "internal_error")
    assert b"secret" not in response.body


@pytest.mark.parametrize("sent", [b"GET / HT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"])
async def test_slow_senders_are_told_and_closed(serve, clock, sent):
    server, connect = await serve(echo, head_timeout_s=3.1, body_timeout_s=3.1)
    client = await connect()
    await client.send(*(sent[i : i + 2] for i in range(0, len(sent), 2)))
    await received(server, sent)
    clock.advance(3.0)
    assert server.num_connections == 1
    clock.advance(0.25)
    response = await client.response()
    assert (response.status, error_of(response.body)) == (408, "request_timeout")
    assert await client.ended()


async def test_dripping_bytes_does_not_extend_the_deadline(serve, clock):
    server, connect = await serve(echo, head_timeout_s=3.1)
    client = await connect()
    sent = b"GET / HTTP/1.1\r\n"
    await client.send(sent)
    await received(server, sent)
    for _ in range(3):
        clock.advance(1.0)
        sent += b"x: y\r\n"
        await client.send(b"x: y\r\n")
        await received(server, sent)
    assert server.num_connections == 1
    clock.advance(0.25)
    assert (await client.response()).status == 408


@pytest.mark.parametrize("is_used", [False, True])
async def test_idle_connections_are_closed_without_a_word(serve, clock, is_used):
    timeout_s = 7.1 if is_used else 3.1
    server, connect = await serve(echo, head_timeout_s=3.1, idle_timeout_s=7.1)
    client = await connect()
    await eventually_async(lambda: server.num_connections)
    if is_used:
        await client.send(POST)
        await client.response()
    clock.advance(timeout_s - 0.1)
    assert not any(connection._transport.is_closing() for connection in server._connections)
    clock.advance(0.25)
    assert await client.ended()
    await eventually_async(lambda: server.num_connections, lambda num_open: num_open == 0)


async def test_connections_over_the_limit_are_closed(serve):
    _, connect = await serve(echo, max_connections=2)
    clients = [await connect() for _ in range(3)]
    assert await clients[2].ended()
    await clients[0].send(POST)
    assert (await clients[0].response()).status == 200


async def test_lingering_client_is_dropped_in_the_end(serve, clock):
    server, connect = await serve(echo, linger_s=2.1)
    client = await connect()
    await client.send(b"NONSENSE\r\n\r\n")
    assert (await client.response()).status == 400
    clock.advance(2.0)
    assert server.num_connections == 1
    clock.advance(0.25)
    await eventually_async(lambda: server.num_connections, lambda num_open: num_open == 0)
    client.close()


async def test_client_gone_is_told_to_the_watcher_once(serve):
    class Watching:
        def __init__(self) -> None:
            self.told: list[str] = []

        def client_gone(self) -> None:
            self.told.append("gone")

        def pause(self) -> None: ...
        def resume(self) -> None: ...

    watching, open_exchanges = Watching(), []

    def app(exchange: Exchange) -> None:
        exchange.watcher = watching
        open_exchanges.append(exchange)

    _, connect = await serve(app)
    client: Client = await connect()
    await client.send(POST)
    await eventually_async(lambda: open_exchanges)
    client.close()
    await eventually_async(lambda: watching.told)
    exchange = open_exchanges[0]
    assert not exchange.is_open
    exchange.respond(200, b"", b"into the void")  # harmless
    exchange.abort()
    assert watching.told == ["gone"]


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_stopping_finishes_what_runs_and_closes_the_rest(serve, clock):
    running: list[Exchange] = []
    server, connect = await serve(running.append)
    busy, idle, late = await connect(), await connect(), await connect()
    await busy.send(POST.replace(b"/echo", b"/busy"))
    await late.send(POST)
    await eventually_async(lambda: len(running), lambda num_running: num_running == 2)
    first = next(one for one in running if one.request.path == b"/busy")
    first.start(200, b"", data=b"half ")
    stopping = asyncio.create_task(server.stop(4.0))
    assert await idle.ended()
    port = busy.writer.get_extra_info("peername")[1]
    await eventually_async(lambda: refuses(port))
    first.write(b"whole", is_last=True)
    assert (await busy.response()).body == b"half whole"
    assert await busy.ended()
    clock.advance(3.9)
    assert not late.reader.at_eof()
    clock.advance(0.1)
    assert await stopping == 1  # the one that never ended
    assert await late.ended()


async def test_replaced_server_answers_requests_that_were_on_their_way(serve, clock):
    """On connections that were idle, new or in mid-stream when it was told to stop; each answer is the last but for
    the one that had begun."""
    running: list[Exchange] = []
    server, connect = await serve(running.append, idle_timeout_s=75.0)
    new, idle, busy, silent = [await connect() for _ in range(4)]
    await eventually_async(lambda: server.num_connections, lambda num_open: num_open == 4)
    for client in (idle, busy):
        await client.send(POST)
        await eventually_async(lambda: running)
        if client is idle:
            running.pop().respond(200, b"", b"")
            assert "connection" not in (await client.response()).headers
    (stream,) = running
    stream.start(200, b"", data=b"half ")
    stopping = asyncio.create_task(server.stop(30.0, idle_grace_s=5.0))
    await eventually_async(lambda: server.is_draining)
    running.clear()
    stream.write(b"whole", is_last=True)
    assert (await busy.response()).body == b"half whole"
    for client in (new, idle, busy):
        await client.send(POST)
        await eventually_async(lambda: running)
        running.pop().respond(200, b"", b"answered")
        answer = await client.response()
        assert (answer.body, answer.headers["connection"]) == (b"answered", "close")
        assert await client.ended()
    assert not stopping.done()
    clock.advance(5.0)
    assert await silent.ended()
    assert await stopping == 0


async def test_replaced_server_that_is_stopped_waits_for_no_idle_connection(serve, clock):
    server, connect = await serve(lambda exchange: None)
    idle = await connect()
    await eventually_async(lambda: server.num_connections)
    stopping = asyncio.create_task(server.stop(30.0, idle_grace_s=5.0))
    await eventually_async(lambda: server.is_draining)
    stopping.cancel()
    assert await server.stop(30.0) == 0
    assert await idle.ended()
