import asyncio
import gc
import tracemalloc

from penstock.http.call import Call
from penstock.http.connection import Connection
from penstock.http.exchange import Exchange
from penstock.http.forward import End, Forwarding
from penstock.http.limits import ClientLimits
from penstock.http.server import Server
from tests.http.scripted import EVENTS, Client, Stream, answering, chunk
from tests.waiting import GIVE_UP_S, eventually_async


class Endless:
    """An upstream that sends for as long as somebody takes it."""

    def __init__(self) -> None:
        self.is_held_up = False

    async def __call__(self, stream: Stream) -> None:
        await stream.request()
        await stream.send(EVENTS)
        event = chunk(b"data: " + b"x" * 4000 + b"\n\n") * 16
        while True:
            stream.writer.write(event)
            self.is_held_up = stream.writer.transport.get_write_buffer_size() > 0
            await stream.writer.drain()
            await asyncio.sleep(0)


def paused(server: Server) -> list[Connection]:
    return [connection for connection in server._connections if connection._is_paused]


async def test_slow_reader_pauses_its_upstream_and_nobody_else(stand):
    async def script(stream: Stream) -> None:
        await (endless if next(turns) == 0 else answering)(stream)

    endless, turns = Endless(), iter(range(10))
    one = await stand(script)
    slow = await one.client()
    slow.reader._limit = 1024  # asyncio then reads no more than this
    await slow.post()
    await eventually_async(lambda: paused(one.gateway.server) and endless.is_held_up)
    (connection,) = one.gateway.server._connections
    forwarding = connection._exchange.watcher
    num_bytes = forwarding._num_bytes
    tracemalloc.start()
    before_bytes, _ = tracemalloc.get_traced_memory()
    quick = await one.client()
    for _ in range(30):
        await quick.post()
        assert (await quick.response()).status == 200
    after_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after_bytes - before_bytes < 500_000
    assert paused(one.gateway.server) == [connection]
    assert forwarding._num_bytes == num_bytes  # nobody reads it, though the kernel may still take some of it
    unsent_bytes = connection._transport.get_write_buffer_size()
    assert unsent_bytes < (64 << 10) + (256 << 10)  # the limit and one read
    slow.reader._limit = 1 << 20
    async with asyncio.timeout(GIVE_UP_S):
        got = 0
        while got < 20_000_000:  # more than all buffers together: it reads again, and the stream goes on
            got += len(await slow.reader.read(1 << 20))
    slow.close()
    await eventually_async(lambda: any(outcome.end is End.CLIENT_GONE for outcome in one.gateway.outcomes))


async def test_reader_that_takes_nothing_is_dropped_and_its_upstream_cancelled(stand, clock):
    endless = Endless()
    one = await stand(endless, client_limits=ClientLimits(stall_timeout_s=5.1))
    stuck = await Client.connect(one.port, receive_buffer=4096)
    stuck.reader._limit = 1024
    await stuck.post()
    await eventually_async(lambda: paused(one.gateway.server) and endless.is_held_up)
    clock.advance(5.0)
    assert one.gateway.server.num_connections == 1
    clock.advance(5.5)  # the kernel may have taken some, but nothing since then
    await eventually_async(lambda: one.gateway.server.num_connections, lambda num_open: num_open == 0)
    assert one.gateway.outcomes[0].end is End.CLIENT_GONE
    await eventually_async(lambda: one.upstreams[0].num_lost, lambda num_lost: num_lost == 1)
    stuck.close()


def things() -> list[object]:
    return [thing for thing in gc.get_objects() if isinstance(thing, (Exchange, Forwarding, Call, Connection))]


async def test_two_hundred_streams_are_right_to_the_byte_and_leave_nothing_behind(stand):
    async def script(stream: Stream) -> None:
        while True:
            name = await stream.request()
            await stream.send(EVENTS)
            for number in range(20):
                await stream.send(chunk(b"data: %b %d\n\n" % (name, number)))
                await asyncio.sleep(0)
            await stream.send(b"0\r\n\r\n")

    gc.collect()
    others = things()  # what other tests left for good: where a loop has ended, a timer holds on to what it would call
    one = await stand(script, script)
    clients = [await one.client() for _ in range(200)]

    async def read(client: Client, number: int) -> None:
        await client.post(b"stream %d" % number)
        if number % 10 == 0:  # and some go away in the middle
            await client.head()
            client.reset()
            return
        async with asyncio.timeout(GIVE_UP_S):
            lines = (await client.head()).lower()
        assert b"chunked" in lines
        body = await client._body({"transfer-encoding": "chunked"})
        assert body == b"".join(b"data: stream %d %d\n\n" % (number, event) for event in range(20))

    await asyncio.gather(*(read(client, number) for number, client in enumerate(clients)))
    await eventually_async(lambda: len(one.gateway.outcomes), lambda num_ended: num_ended == 200)
    ends = [outcome.end for outcome in one.gateway.outcomes]
    assert (ends.count(End.COMPLETED), ends.count(End.CLIENT_GONE)) == (180, 20)
    for client in clients:
        client.close()
    await eventually_async(lambda: one.gateway.server.num_connections, lambda num_open: num_open == 0)
    await eventually_async(lambda: all(way.num_open == way.num_idle for way in one.gateway.upstreams))
    left = [thing for thing in things() if all(thing is not other for other in others)]
    assert not left  # and it took no collector: there are no cycles
