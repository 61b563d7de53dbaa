"""Over real sockets: a publisher that does as vLLM's does, and a reader in its thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from penstock.dialects.kv_blocks import Changes
from penstock.gateway.replicas.zmq_events import EventSource, IndexTeller, KvEventReader
from penstock.router.prefix_index import PrefixIndex
from tests.dialects.engine_cache import EngineCache
from tests.waiting import GIVE_UP_S
from tests.waiting import eventually_async as eventually

ROUTING_TOKENS = 256


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher whose thread has to wait for the processor is not taken for one that replays nothing."""
    monkeypatch.setattr("penstock.gateway.replicas.zmq_events._REPLAY_S", GIVE_UP_S)


class Publisher:
    """XPUB for what is new, which knows who listens; ROUTER for what is asked for again."""

    def __init__(self, context: Any, kept: int = 1000) -> None:
        self.cache = EngineCache(64)
        self._kept = kept
        self._sent: list[bytes] = []
        self._live = context.socket(zmq.XPUB)
        self._replay = context.socket(zmq.ROUTER)
        self.source = EventSource("r", self._bind(self._live), self._bind(self._replay), topic="kv")
        self.num_replays = 0
        self._is_open = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @staticmethod
    def _bind(bound: Any) -> str:
        return f"tcp://127.0.0.1:{bound.bind_to_random_port('tcp://127.0.0.1')}"

    def publish(self, events: list[Any], *, is_lost: bool = False) -> None:
        number, payload = len(self._sent), msgspec.msgpack.encode([float(len(self._sent)), events, 0])
        self._sent.append(payload)
        if not is_lost:
            self._live.send_multipart((b"kv@r@m", number.to_bytes(8, "big"), payload))

    def has_listener(self) -> bool:
        """What is published from then on arrives."""
        return bool(self._live.poll(0)) and self._live.recv() == b"\x01kv"

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._live.close(linger=0)

    def _serve(self) -> None:
        while self._is_open:
            if not self._replay.poll(20):
                continue
            client, _, start = self._replay.recv_multipart()
            self.num_replays += 1
            for number, payload in list(enumerate(self._sent))[-self._kept :]:
                if number >= int.from_bytes(start, "big"):
                    self._replay.send_multipart((client, b"", b"kv@r@m", number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
        self._replay.close(linger=0)


@contextlib.contextmanager
def publishing(kept: int = 1000) -> Iterator[Publisher]:
    with zmq.Context() as context:
        publisher = Publisher(context, kept)
        try:
            yield publisher
        finally:
            publisher.close()


class Index:
    def __init__(self) -> None:
        self.known: set[int] = set()
        self.is_approximate: bool | None = None
        self.thread = threading.get_ident()

    def told(self, source: EventSource, changes: Changes, is_approximate: bool) -> None:
        assert threading.get_ident() == self.thread  # in the event loop
        if changes.is_cleared:
            self.known.clear()
        self.known -= set(changes.removed)
        self.known |= set(changes.stored)
        self.is_approximate = is_approximate


@contextlib.asynccontextmanager
async def reading(source: EventSource) -> AsyncIterator[Index]:
    index = Index()
    reader = KvEventReader(index.told)
    reader.add(source)
    try:
        await eventually(lambda: index.is_approximate is not None)  # told once, that nothing is known yet
        yield index
    finally:
        reader.close()


def prompt(which: int) -> list[int]:
    return [which] * (2 * ROUTING_TOKENS)


async def follows(publisher: Publisher, index: Index) -> None:
    """Once the reader has been told everything, and hears what is new."""
    await eventually(publisher.has_listener)
    await eventually(lambda: (publisher.num_replays, index.is_approximate), lambda seen: seen == (1, False))


async def test_who_comes_late_is_told_everything_and_then_follows() -> None:
    with publishing() as publisher:
        publisher.publish(publisher.cache.prefill(prompt(1)))
        async with reading(publisher.source) as index:
            await eventually(lambda: index.known == publisher.cache.routing(ROUTING_TOKENS))
            await follows(publisher, index)
            publisher.publish(publisher.cache.prefill(prompt(2)))
            await eventually(lambda: len(index.known) == 4)
            publisher.publish(publisher.cache.evict_leaf(0))
            await eventually(lambda: index.known == publisher.cache.routing(ROUTING_TOKENS))
            assert index.is_approximate is False


async def test_the_routers_own_index_is_exact_once_the_replay_is_over() -> None:
    index = PrefixIndex()
    with publishing() as publisher:
        publisher.publish(publisher.cache.prefill(prompt(1)))
        reader = KvEventReader(IndexTeller(index).told)
        reader.add(publisher.source)
        await eventually(lambda: index.is_exact("r"))
        assert index.num_blocks("r") == 2
        reader.close()


async def test_a_gap_is_filled_by_a_replay() -> None:
    with publishing() as publisher:
        async with reading(publisher.source) as index:
            await follows(publisher, index)
            publisher.publish(publisher.cache.prefill(prompt(1)), is_lost=True)
            publisher.publish(publisher.cache.prefill(prompt(2)))
            await eventually(lambda: index.known == publisher.cache.routing(ROUTING_TOKENS))
            assert publisher.num_replays == 2
            assert index.is_approximate is False


async def test_what_nobody_can_give_again_makes_the_index_approximate() -> None:
    with publishing(kept=1) as publisher:
        async with reading(publisher.source) as index:
            await follows(publisher, index)
            publisher.publish(publisher.cache.prefill(prompt(1)), is_lost=True)
            publisher.publish(publisher.cache.prefill(prompt(2)))
            await eventually(lambda: index.is_approximate is True)
            await eventually(lambda: len(index.known) == 2)


async def test_an_index_is_told_of_all_ranks_as_one_replica() -> None:
    index = PrefixIndex()
    teller = IndexTeller(index)
    first, second = EventSource("r", "tcp://h:1"), EventSource("r", "tcp://h:2")

    def tell(
        source: EventSource,
        stored: list[int],
        removed: list[int],
        on_host: tuple[int, ...] = (),
        *,
        is_cleared: bool = False,
    ) -> None:
        changes = Changes()
        changes.stored, changes.removed = dict.fromkeys(stored), dict.fromkeys(removed)
        changes.on_host = dict.fromkeys(on_host)
        changes.is_cleared = is_cleared
        teller.told(source, changes, False)

    tell(first, [1, 2], [])
    tell(second, [2, 3], [])
    assert index.num_blocks("r") == 3
    tell(first, [], [2])
    assert index.num_blocks("r") == 3  # the other rank has it
    tell(second, [], [], on_host=(2, 3))
    assert index.on_host((3,), {"r": 1}) == index.on_host((2,), {"r": 1}) == {"r": 1}
    tell(first, [2], [])
    assert index.on_host((2,), {"r": 1}) == {}  # one rank has it on the device
    tell(first, [], [2])
    tell(first, [], [], on_host=(1,))
    tell(first, [9], [], is_cleared=True)
    assert index.num_blocks("r") == 3
    tell(second, [], [], is_cleared=True)
    assert index.num_blocks("r") == 1
    assert index.is_exact("r")
    teller.told(first, Changes(), True)
    assert not index.is_exact("r")
    tell(first, [], [])
    assert index.is_exact("r")
    assert index.num_blocks("r") == 1
    teller.forget("r")
    assert index.num_blocks("r") == 0


async def test_readers_of_nobody_end() -> None:
    told: list[object] = []
    reader = KvEventReader(lambda *_: told.append(None))
    source = EventSource("gone", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    reader.add(source)
    await eventually(lambda: told)
    reader.remove(source)
    reader.close()
