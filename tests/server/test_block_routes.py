"""What a replica says of its KV cache, read off the wire."""

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Iterator

import pytest

from penstock.api import kv_blocks
from penstock.api.asgi import Message, Request
from penstock.api.kv_blocks import BlockNews, unpack
from penstock.api.relay import NAMESPACE_HEADER, SECRET_HEADER
from penstock.api.sink import Headers
from penstock.core.clock import MonotonicClock
from penstock.core.hashing import cache_namespace, routing_hashes
from penstock.core.settings import ServerSettings
from penstock.engine.client import EngineClient
from penstock.server.block_routes import BlockRoutes
from penstock.server.drain import Drain
from penstock.server.gateway_headers import GatewayTrust
from tests.engine.expecting import no_pause
from tests.engine.fake_engine import launcher
from tests.server.replica import NAME, Replica, serving
from tests.waiting import GIVE_UP_S, eventually, eventually_async

SIZE = 16


@pytest.fixture(scope="module")
def telling() -> Iterator[Replica]:
    with serving(routing_tokens=SIZE, num_blocks=64) as found:
        yield found


@contextlib.contextmanager
def following(replica: Replica, **headers: str) -> Iterator[Iterator[BlockNews]]:
    connection = http.client.HTTPConnection(replica.host, replica.port, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.request("GET", kv_blocks.PATH, headers=headers)
        yield read(connection.getresponse())


def read(response: http.client.HTTPResponse) -> Iterator[BlockNews]:
    assert response.status == 200
    while line := response.readline():
        if line.startswith(b"data: "):
            news = kv_blocks.decode(line.removeprefix(b"data: "))
            assert news is not None
            yield news


def ask(replica: Replica, prompt: list[int], *, namespace: str = "", salt: str | None = None) -> list[int]:
    """The routing hashes of what the cache holds of it afterwards: all but the last token is computed."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
    headers = {NAMESPACE_HEADER: namespace} if namespace else {}
    status, _, _ = replica.call("POST", "/v1/completions", body, **headers)
    assert status == 200
    return routing_hashes(cache_namespace(namespace, salt or ""), prompt, SIZE)


def test_what_leaves_the_device_for_the_host_is_said_to_be_there() -> None:
    with serving(routing_tokens=SIZE, num_blocks=8, host_blocks=60) as replica:
        first, second = ask(replica, [1] * 30), ask(replica, [2] * 30)
        with following(replica) as events:
            snapshot = next(events)
            assert (unpack(snapshot.hashes or b""), unpack(snapshot.host)) == (tuple(second), tuple(first))
            ask(replica, [1] * 30)  # it comes back, and the other one goes there
            news = next(one for one in events if one.stored)
            assert (unpack(news.stored), unpack(news.host)) == (tuple(first), tuple(second))
            assert news.removed == b""
            for start in range(3, 20):
                ask(replica, [start] * 30)
            gone = {name for one in events_until_idle(replica, events) for name in unpack(one.removed)}
            assert {*first, *second} <= gone


def events_until_idle(replica: Replica, events: Iterator[BlockNews]) -> Iterator[BlockNews]:
    for news in events:
        yield news
        if news.seq == replica.engine.cache.seq:
            return


def test_a_snapshot_comes_first_and_then_what_changes(telling: Replica) -> None:
    known = ask(telling, [7] * 33)
    assert len(known) == 2
    eventually(lambda: set(telling.engine.cache.hashes), lambda found: found >= set(known))
    with following(telling) as news:
        first = next(news)
        assert first.hashes is not None
        assert set(unpack(first.hashes)) == telling.engine.cache.hashes.keys()
        assert (first.boot, first.size) == (telling.engine.cache.boot, SIZE)
        more = ask(telling, [7] * 33 + [8] * 31)[2:]
        change = next(each for each in news if each.stored)
        assert (change.boot, change.after, change.hashes) == (first.boot, first.seq, None)
        assert change.seq > change.after
        assert list(unpack(change.stored)) == more


def test_a_silent_cache_gives_signs_of_life(telling: Replica) -> None:
    with following(telling) as news:
        first = next(news)
        assert next(news) == BlockNews(first.boot, first.seq, after=first.seq)


def test_tenants_and_their_clients_salts_never_share_a_hash(telling: Replica) -> None:
    prompt = [9] * 32
    found = [
        ask(telling, prompt, namespace=namespace, salt=salt)
        for namespace, salt in [("", None), ("acme", None), ("acme", "s"), ("", "s"), ("acmes", None)]
    ]
    told = {name for names in found for name in names}
    assert len(told) == 10
    eventually(lambda: telling.engine.cache.hashes.keys() >= told)


def test_what_is_evicted_is_told(telling: Replica) -> None:
    first = ask(telling, [5] * 48)
    eventually(lambda: telling.engine.cache.hashes.keys() >= set(first))
    with following(telling) as news:
        next(news)
        for token in range(20, 26):
            ask(telling, [token] * 200)
        removed: set[int] = set()
        while not removed >= set(first):
            change = next(news)
            assert change.hashes is None
            removed |= set(unpack(change.removed))


def test_an_engine_that_starts_again_begins_anew_for_everybody() -> None:
    may_return = threading.Event()
    with serving(routing_tokens=SIZE, may_return=may_return, sleep=no_pause) as replica:
        names = ask(replica, [1] * 64)
        eventually(lambda: replica.engine.cache.hashes.keys() >= set(names))
        with following(replica) as news:
            first = next(news)
            replica.kill_engine()
            snapshots = (each for each in news if each.hashes is not None)
            dead = next(snapshots)
            assert (dead.hashes, dead.size) == (b"", 0)
            may_return.set()
            again = next(snapshots)
            assert (again.hashes, again.size) == (b"", SIZE)
            assert len({first.boot, dead.boot, again.boot}) == 3
            names = ask(replica, [2] * 64)
            change = next(each for each in news if each.stored)
            assert set(unpack(change.stored)) <= set(names)


def test_a_reader_that_is_too_slow_for_the_changes_gets_a_snapshot_instead() -> None:
    async def drill() -> None:
        engine = EngineClient(launcher(), MonotonicClock())
        engine.cache.begin(SIZE)
        engine.cache.take(range(10), ())
        sent: list[BlockNews] = []
        is_ready, is_waiting = asyncio.Event(), asyncio.Event()

        class SlowSink:
            """A client that takes its first event, and the next when it is ready."""

            is_started = False

            async def start(self, status: int, headers: Headers = ()) -> None:
                self.is_started = True

            async def write(self, data: bytes, is_last: bool = False) -> None:
                news = kv_blocks.decode(data.removeprefix(b"data: "))
                assert news is not None
                if sent:
                    is_waiting.set()
                    await is_ready.wait()
                sent.append(news)

        async def receive() -> Message:
            if not sent:
                return {"type": "http.request", "body": b""}
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"method": "GET", "path": kv_blocks.PATH, "headers": []}
        routes = BlockRoutes(engine, Drain(), GatewayTrust(None))
        task = asyncio.create_task(routes.blocks(Request(scope, receive), SlowSink()))
        await eventually_async(lambda: sent)
        engine.cache.take([10], ())
        await is_waiting.wait()  # it stands at the first change, while thousands follow
        for start in range(100, 10_100, 100):
            engine.cache.take(range(start, start + 100), range(start - 100, start))
        is_ready.set()
        await eventually_async(lambda: sent[-1].seq, lambda seq: seq == engine.cache.seq)
        task.cancel()
        assert [news.hashes is not None for news in sent] == [True, False, True]
        assert set(unpack(sent[-1].hashes or b"")) == engine.cache.hashes.keys()
        assert sent[-1].seq == engine.cache.seq

    asyncio.run(drill())


def test_only_who_knows_the_secret_is_told() -> None:
    with serving(ServerSettings(gateway_secret="hush"), routing_tokens=SIZE) as replica:
        assert replica.call("GET", kv_blocks.PATH)[0] == 403
        with following(replica, **{SECRET_HEADER: "hush"}) as news:
            assert next(news).size == SIZE


def test_a_cache_that_cannot_say_says_so(replica: Replica) -> None:
    with following(replica) as news:
        first = next(news)
        assert (first.size, first.hashes) == (0, b"")
