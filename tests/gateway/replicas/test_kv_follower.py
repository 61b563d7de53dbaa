"""Whatever is lost on the way, the gateway's picture of a replica's KV cache is exact again within a second.

The replica is real but for the model. Between it and the gateway stands a proxy that cuts, stalls and swallows.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest

from penstock.api import kv_blocks
from penstock.api.kv_blocks import BlockNews, pack
from penstock.api.sse import event
from penstock.core.hashing import routing_hashes
from penstock.gateway.replicas.kv_follower import KvFollower
from penstock.http.upstream import Upstream
from tests.clocks import ManualClock
from tests.server.replica import Replica, serving
from tests.server.test_block_routes import SIZE, ask
from tests.waiting import eventually_async

ID = "r1"


class Mirror:
    """The plainest index there is."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {}
        self.on_host: set[int] = set()  # of the only replica that has any
        self.resets = 0
        self.is_exact = False
        self.largest = 0  # number of hashes at a time

    def reset(self, replica_id: str, hashes: Sequence[int]) -> None:
        self.held[replica_id] = set()
        self.on_host = set()
        self.resets += 1
        self.is_exact = True
        self.stored(replica_id, hashes)

    def stored(self, replica_id: str, hashes: Sequence[int]) -> None:
        self.held[replica_id] |= set(hashes)
        self.on_host -= set(hashes)
        self.largest = max(self.largest, len(hashes))

    def stored_on_host(self, replica_id: str, hashes: Sequence[int]) -> None:
        self.held[replica_id] -= set(hashes)
        self.on_host |= set(hashes)

    def removed(self, replica_id: str, hashes: Sequence[int]) -> None:
        self.held[replica_id] -= set(hashes)
        self.on_host -= set(hashes)

    def lost_track(self, replica_id: str) -> None:
        self.is_exact = False

    def forget(self, replica_id: str) -> None:
        self.held.pop(replica_id, None)


class Proxy:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._writers: set[asyncio.StreamWriter] = set()
        self.swallows = False  # the next change, or sign of life, that the replica tells is lost
        self.losses = 0
        self.flows = asyncio.Event()  # else everything stands still
        self.flows.set()
        self.num_held = 0  # connections that have something for the gateway, and do not let it through
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(self._replica.host, self._replica.port)
        self._writers |= {writer, up_writer}
        up_writer.write(await reader.readuntil(b"\r\n\r\n"))
        with contextlib.suppress(OSError):
            while data := await up_reader.read(1 << 20):
                self.num_held += not self.flows.is_set()
                await self.flows.wait()
                if self.swallows and b"after" in data:
                    self.swallows = False
                    self.losses += 1
                    continue
                writer.write(data)
        self._writers -= {writer, up_writer}
        for each in (writer, up_writer):
            each.close()

    def cut(self) -> None:
        self.losses += 1
        for writer in self._writers:
            writer.transport.abort()


@contextlib.asynccontextmanager
async def proxy_to(replica: Replica, clock: ManualClock) -> AsyncIterator[tuple[Proxy, Upstream]]:
    proxy = Proxy(replica)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    upstream = Upstream("127.0.0.1", server.sockets[0].getsockname()[1], clock=clock)
    try:
        yield proxy, upstream
    finally:
        upstream.close()
        proxy.cut()
        server.close()


async def within_a_second(follower: KvFollower, clock: ManualClock, condition: Callable[[], bool]) -> None:
    """Of the follower's time, which passes only while it waits before it connects again."""
    began_s = clock.now()

    def look() -> bool:
        is_so = condition()
        if not is_so and follower._call is None:
            clock.advance_to_next()
        return is_so

    await eventually_async(look)
    assert clock.now() - began_s <= 1.0


@pytest.fixture(autouse=True)
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that says every few milliseconds what it says every 50, so that tests need not wait for it."""
    monkeypatch.setattr("penstock.server.block_routes._PERIOD_S", 0.005)


@pytest.fixture(scope="module")
def telling() -> Iterator[Replica]:
    with serving(routing_tokens=SIZE, num_blocks=64, host_blocks=60) as found:
        yield found


def test_the_mirror_is_exact_after_any_mix_of_losses(telling: Replica) -> None:
    asyncio.run(losing(telling, random.Random(1), 30))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.drill) for seed in range(4, 8))])
def test_the_mirror_is_exact_after_many_losses(telling: Replica, seed: int) -> None:
    asyncio.run(losing(telling, random.Random(seed), 100))


async def losing(telling: Replica, chance: random.Random, num_acts: int) -> None:
    mirror, clock = Mirror(), ManualClock()
    held, on_host = telling.engine.cache.hashes.keys, telling.engine.cache.on_host.keys
    most_on_host = 0
    async with proxy_to(telling, clock) as (proxy, upstream):
        follower = KvFollower(ID, upstream, b"", mirror, SIZE)
        for _ in range(num_acts):
            match chance.choice(["ask", "ask", "ask", "cut", "swallow", "swallow"]):
                case "ask":  # over time many times what the cache holds, with much in common
                    prompt = [chance.randrange(3)] * chance.randrange(8, 120) + [chance.randrange(9)] * 40
                    await asyncio.to_thread(ask, telling, prompt)
                case "cut":
                    proxy.cut()
                case "swallow":
                    proxy.swallows = True
            clock.advance(chance.choice([0.0, 0.02, 0.1]))
            await asyncio.sleep(chance.choice([0.0, 0.002, 0.01]))
            if chance.random() < 0.2:
                await within_a_second(
                    follower, clock, lambda: mirror.held.get(ID) == held() and mirror.on_host == on_host()
                )
                most_on_host = max(most_on_host, len(mirror.on_host))
        proxy.swallows = False
        await within_a_second(
            follower,
            clock,
            lambda: mirror.held.get(ID) == held() and mirror.on_host == on_host() and follower.is_exact,
        )
        assert held()
        assert max(most_on_host, len(on_host())) > 0
        assert proxy.losses > num_acts // 5
        follower.close()
        assert mirror.held == {}


def test_an_engine_that_starts_again_is_followed_on_the_same_connection() -> None:
    async def drill(replica: Replica) -> None:
        mirror, clock = Mirror(), ManualClock()
        async with proxy_to(replica, clock) as (proxy, upstream):
            follower = KvFollower(ID, upstream, b"", mirror, SIZE)
            names = await asyncio.to_thread(ask, replica, [3] * 64)
            await eventually_async(lambda: mirror.held.get(ID) == set(names))
            replica.kill_engine()
            await eventually_async(lambda: ID not in mirror.held)
            await eventually_async(lambda: mirror.held.get(ID) == set())
            await asyncio.to_thread(ask, replica, [4] * 64)
            await eventually_async(lambda: mirror.held.get(ID) == replica.engine.cache.hashes.keys() != set())
            assert (proxy.connections, follower.is_exact) == (1, True)
            follower.close()

    with serving(routing_tokens=SIZE) as replica:
        asyncio.run(drill(replica))


def test_a_silent_connection_is_given_up_and_what_is_known_is_kept_until_the_next_snapshot(telling: Replica) -> None:
    async def drill() -> None:
        mirror, clock = Mirror(), ManualClock()
        async with proxy_to(telling, clock) as (proxy, upstream):
            follower = KvFollower(ID, upstream, b"", mirror, SIZE)
            await asyncio.to_thread(ask, telling, [6] * 64)
            await eventually_async(lambda: mirror.held.get(ID) == telling.engine.cache.hashes.keys())
            known = set(mirror.held[ID])
            proxy.flows.clear()
            await eventually_async(lambda: proxy.num_held == 1)  # what it had in hand has arrived
            clock.advance(1.0)
            assert follower.is_exact
            clock.advance(0.6)  # it looks every quarter of a second, and connects again after a tenth
            assert not follower.is_exact
            await eventually_async(lambda: proxy.connections == 2)
            assert mirror.held[ID] == known
            assert not mirror.is_exact
            proxy.flows.set()
            await eventually_async(lambda: follower.is_exact)
            assert (mirror.resets, mirror.is_exact) == (2, True)
            follower.close()

    asyncio.run(drill())


def test_a_replica_that_is_gone_is_forgotten_and_found_again() -> None:
    async def drill() -> None:
        mirror, clock = Mirror(), ManualClock()
        upstream: Upstream | None = None
        follower: KvFollower | None = None
        for tokens in ([1] * 64, [2] * 48):
            with serving(routing_tokens=SIZE) as replica:
                await asyncio.to_thread(ask, replica, tokens)
                if upstream is None:
                    upstream = Upstream(replica.host, replica.port, clock=clock)
                    follower = KvFollower(ID, upstream, b"", mirror, SIZE)
                else:
                    upstream.port = replica.port  # as a name is moved to another server
                held = replica.engine.cache.hashes.keys()
                assert follower is not None
                await within_a_second(follower, clock, lambda: mirror.held.get(ID) == held)  # noqa: B023
                assert held == set(routing_hashes("", tokens, SIZE))
                upstream.close()
                upstream.port = 1
                await within_a_second(follower, clock, lambda: ID not in mirror.held)
        assert follower is not None
        follower.close()

    asyncio.run(drill())


def test_blocks_of_another_size_are_of_no_use_and_taken_for_none(telling: Replica) -> None:
    async def drill() -> None:
        mirror, clock = Mirror(), ManualClock()
        async with proxy_to(telling, clock) as (proxy, upstream):
            follower = KvFollower(ID, upstream, b"", mirror, 4 * SIZE)
            await asyncio.to_thread(ask, telling, [8] * 64)
            await eventually_async(lambda: follower._last and follower._last.seq == telling.engine.cache.seq)
            assert not follower.is_exact
            assert (mirror.held, proxy.connections) == ({}, 1)
            follower.close()

    asyncio.run(drill())


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


@contextlib.asynccontextmanager
async def scripted(answer: bytes, clock: ManualClock) -> AsyncIterator[tuple[Upstream, list[float]]]:
    """A server that says this, and then nothing; and when it was asked."""
    asked: list[float] = []

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(clock.now())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    upstream = Upstream("127.0.0.1", server.sockets[0].getsockname()[1], clock=clock)
    try:
        yield upstream, asked
    finally:
        upstream.close()
        server.close()


def test_a_server_that_has_no_such_news_is_not_asked_again_and_again() -> None:
    async def drill() -> None:
        clock = ManualClock()
        async with scripted(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", clock) as (upstream, asked):
            mirror = Mirror()
            follower = KvFollower(ID, upstream, b"", mirror, SIZE)
            await eventually_async(lambda: follower._call is None)
            clock.advance(9.9)
            assert (follower._call, len(asked), mirror.held, follower.is_exact) == (None, 1, {}, False)
            clock.advance(0.2)
            assert follower._call is not None  # by now it may have been replaced by one that has
            follower.close()

    asyncio.run(drill())


@pytest.mark.parametrize(
    "wrong",
    [
        BlockNews("b", 9, after=8),  # a gap
        BlockNews("c", 8, after=7),  # another process's
        b"data: nonsense\n\n",
    ],
)
def test_news_that_do_not_follow_are_not_believed(wrong: BlockNews | bytes) -> None:
    async def drill() -> None:
        begin = event(kv_blocks.encode(BlockNews("b", 7, size=SIZE, hashes=pack([1, 2]))))
        tail = wrong if isinstance(wrong, bytes) else event(kv_blocks.encode(wrong))
        clock = ManualClock()
        async with scripted(STREAM + begin + b": a comment\n\n" + tail, clock) as (upstream, asked):
            follower = KvFollower(ID, upstream, b"", Mirror(), SIZE)
            await within_a_second(follower, clock, lambda: len(asked) == 3)
            assert asked[2] - asked[0] > 0.15  # not in a hurry
            follower.close()

    asyncio.run(drill())


def test_a_large_snapshot_is_told_in_slices_and_what_follows_waits_for_them() -> None:
    async def drill() -> None:
        chance = random.Random(1)
        hashes = [chance.getrandbits(64) for _ in range(16_000)]
        begin = BlockNews("b", 7, size=SIZE, hashes=pack(hashes))
        change = BlockNews("b", 8, after=7, stored=pack([5]), removed=pack(hashes[-2:]))
        answer = STREAM + event(kv_blocks.encode(begin)) + event(kv_blocks.encode(change))
        async with scripted(answer, ManualClock()) as (upstream, _):
            mirror = Mirror()
            follower = KvFollower(ID, upstream, b"", mirror, SIZE)
            await eventually_async(lambda: follower.is_exact)
            assert mirror.held[ID] == {*hashes[:-2], 5}
            assert mirror.largest <= 512
            follower.close()

    asyncio.run(drill())
