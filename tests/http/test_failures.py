import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from penstock.http.call import FailureKind
from penstock.http.forward import End
from penstock.http.limits import UpstreamLimits
from tests.http.scripted import EVENTS, Stream, answering, chunk, whole
from tests.waiting import eventually_async


@contextmanager
def not_accepting() -> Iterator[int]:
    """A port whose queue of connections is full: the next one waits."""
    with ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        open_sockets.enter_context(socket.create_connection(listener.getsockname()))
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "kind", "is_after"),
    [
        (b"", FailureKind.CLOSED, False),
        (b"HTTP/1.1 200 O", FailureKind.BROKEN, False),
        (whole(b"12345")[:-5], FailureKind.BROKEN, False),  # a head alone has shown the client nothing
        (whole(b"12345")[:-2], FailureKind.BROKEN, True),
        (EVENTS, FailureKind.BROKEN, False),
        (EVENTS + b"9\r\ndata", FailureKind.BROKEN, False),
        (EVENTS + chunk(b"data: 1\n\n") + b"9\r\ndata", FailureKind.BROKEN, True),
        (EVENTS + chunk(b"data: 1\n\n"), FailureKind.BROKEN, True),
        (EVENTS + chunk(b"data: 1\n\n") + b"zz\r\n", FailureKind.MALFORMED, False),  # nothing of a wrong read is used
        (b"SSH-2.0-OpenSSH\r\n", FailureKind.MALFORMED, False),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
            FailureKind.MALFORMED,
            False,
        ),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99_999, FailureKind.MALFORMED, False),
    ],
)
@pytest.mark.parametrize("is_reset", [False, True])
async def test_upstream_that_dies_at_any_stage_is_reported_as_it_was(stand, answer, kind, is_after, is_reset):
    async def script(stream: Stream) -> None:
        await stream.request()
        await stream.send(answer)
        if is_reset:  # which would take with it what the gateway has not read yet
            connections = one.gateway.upstreams[0]._connections
            await eventually_async(lambda: not answer or all(connection._has_answered for connection in connections))
            stream.reset()

    one = await stand(script)
    client = await one.client()
    await client.post()
    if is_after:
        assert await client.head()
        rest = await client.reader.read()
        assert not rest.endswith(b"0\r\n\r\n")
    else:
        response = await client.response()
        assert (response.status, json.loads(response.body)["error"]["code"]) == (503, "engine_unavailable")
        await client.post()  # the client's connection is as good as before
        assert (await client.response()).status == 503
    outcome = one.gateway.outcomes[0]
    assert (outcome.end, outcome.failure.kind) == (End.FAILED_AFTER if is_after else End.FAILED_BEFORE, kind)
    assert outcome.failure.was_sent


async def test_nobody_listening_is_known_not_to_have_been_sent(stand):
    one = await stand(answering)
    await one.upstreams[0].stop()
    client = await one.client()
    await client.post()
    assert (await client.response()).status == 503
    failure = one.gateway.outcomes[0].failure
    assert (failure.kind, failure.was_sent) == (FailureKind.REFUSED, False)


async def test_upstream_that_never_accepts_times_out(stand, clock):
    one = await stand(answering, upstream_limits=UpstreamLimits(connect_timeout_s=1.1))
    with not_accepting() as one.gateway.upstreams[0].port:
        client = await one.client()
        await client.post()
        await eventually_async(lambda: clock.waits_s, lambda waits_s: 1.1 in waits_s)
        clock.advance(1.0)
        assert one.gateway.outcomes == []
        clock.advance(0.1)
        assert (await client.response()).status == 503
    failure = one.gateway.outcomes[0].failure
    assert (failure.kind, failure.was_sent) == (FailureKind.CONNECT_TIMEOUT, False)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(b"", FailureKind.FIRST_BYTE_TIMEOUT), (EVENTS + chunk(b"data: 1\n\n"), FailureKind.SILENCE)],
)
async def test_silent_upstreams_are_given_up(stand, clock, answer, kind):
    asked = asyncio.Event()

    async def script(stream: Stream) -> None:
        await stream.request()
        asked.set()
        await stream.send(answer)
        await stream.request()

    limits = UpstreamLimits(first_byte_timeout_s=5.1, silence_timeout_s=9.1)
    timeout_s = 9.1 if answer else 5.1
    one = await stand(script, upstream_limits=limits)
    client = await one.client()
    await client.post()
    await asked.wait()
    if answer:
        assert await client.head()
    clock.advance(timeout_s)
    assert one.gateway.outcomes == []
    clock.advance(0.5)  # from sweep to sweep
    assert [outcome.failure.kind for outcome in one.gateway.outcomes] == [kind]
    if not answer:
        assert await client.head()
    await eventually_async(lambda: one.upstreams[0].num_lost, lambda num_lost: num_lost == 1)


async def test_connection_closed_while_unused_is_replaced_once_and_nobody_notices(stand):
    bodies: list[bytes] = []

    async def script(stream: Stream) -> None:
        """Answers once, and closes as the second request arrives: the race of every keep-alive timeout."""
        bodies.append(await stream.request())
        await stream.send(whole(b"fine"))
        await stream.head()
        stream.reset()

    one = await stand(script)
    client = await one.client()
    for number in range(3):
        await client.post(b"%d" % number)
        assert (await client.response()).body == b"fine"
    assert bodies == [b"0", b"1", b"2"]
    assert one.upstreams[0].num_accepted == 3


async def test_a_fresh_connection_that_is_closed_is_not_tried_again(stand):
    async def script(stream: Stream) -> None:
        await stream.request()

    one = await stand(script)
    client = await one.client()
    await client.post()
    assert (await client.response()).status == 503
    assert one.upstreams[0].num_accepted == 1


async def test_unused_connections_are_closed_in_time_and_bounded_in_number(stand, clock):
    one = await stand(answering, upstream_limits=UpstreamLimits(keep_alive_s=5.1, max_idle=3))
    clients = [await one.client() for _ in range(6)]
    await asyncio.gather(*(client.post() for client in clients))
    await asyncio.gather(*(client.response() for client in clients))
    way = one.gateway.upstreams[0]
    assert 1 <= way.num_idle <= 3
    clock.advance(5.1)
    assert way.num_idle >= 1
    clock.advance(0.5)  # from sweep to sweep
    await eventually_async(lambda: way.num_open, lambda num_open: num_open == 0)


@pytest.mark.parametrize("when", ["before the answer", "in mid-stream"])
async def test_client_that_goes_cancels_upstream_at_once(stand, when):
    """Without a timer: the clock stands still."""
    asked, lost = asyncio.Event(), asyncio.Event()

    async def script(stream: Stream) -> None:
        await stream.request()
        asked.set()
        if when == "in mid-stream":
            await stream.send(EVENTS + chunk(b"data: 1\n\n"))
        try:
            await stream.head()
        finally:
            lost.set()

    one = await stand(script)
    client = await one.client()
    await client.post()
    if when == "in mid-stream":
        await client.head()
    await asked.wait()
    client.close()
    await lost.wait()
    assert one.gateway.outcomes[0].end is End.CLIENT_GONE
    await eventually_async(lambda: one.gateway.upstreams[0].num_open, lambda num_open: num_open == 0)


async def test_client_that_goes_while_we_connect_ends_the_attempt(stand):
    one = await stand(answering)
    with not_accepting() as one.gateway.upstreams[0].port:
        client = await one.client()
        await client.post()
        await eventually_async(lambda: one.gateway.upstreams[0].num_open, lambda num_open: num_open == 1)
        client.close()
        await eventually_async(lambda: one.gateway.upstreams[0].num_open, lambda num_open: num_open == 0)
    assert one.gateway.outcomes[0].end is End.CLIENT_GONE
