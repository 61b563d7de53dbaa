from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.dialects.kv_blocks import Changes, EngineBlocks
from penstock.dialects.kv_stream import KvStream
from tests.dialects.engine_cache import EngineCache

SIZE = 4


class Publisher:
    """Numbers what an engine says, and keeps some of it."""

    def __init__(self, kept: int = 1000, since: float = 0.0) -> None:
        self.cache = EngineCache(2)
        self.sent: list[bytes] = []
        self._kept = kept
        self._since = since

    def prefill(self, tokens: list[int]) -> tuple[int, bytes]:
        return self._send(self.cache.prefill(tokens))

    def evict(self) -> tuple[int, bytes]:
        return self._send(self.cache.evict_leaf(0))

    def replay(self, stream: KvStream, changes: Changes) -> None:
        assert stream.wants_replay is not None
        for number, payload in list(enumerate(self.sent))[-self._kept :]:
            if number >= stream.wants_replay:
                stream.replayed(number, payload, changes)
        stream.replay_over(changes)

    def _send(self, events: list[Any]) -> tuple[int, bytes]:
        payload = msgspec.msgpack.encode([self._since + len(self.sent), events])
        self.sent.append(payload)
        return len(self.sent) - 1, payload


def new_stream(can_replay: bool = True) -> KvStream:
    return KvStream(EngineBlocks(size=SIZE), can_replay=can_replay)


def knows_all(stream: KvStream, publisher: Publisher) -> bool:
    return set(stream.blocks.hashes()) == publisher.cache.routing(SIZE)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=12), st.booleans()), max_size=20), st.integers(0, 20))
def test_who_joins_late_and_misses_some_is_exact_after_a_replay(
    doings: list[tuple[list[int], bool]], joins_at: int
) -> None:
    publisher, stream = Publisher(), new_stream()
    publisher.prefill([0, 0, 0, 0])
    for index, (tokens, arrives) in enumerate(doings):
        message = publisher.evict() if len(tokens) == 1 else publisher.prefill(tokens)
        if index >= joins_at and arrives:
            changes = Changes()
            stream.live(*message, changes)
            if stream.wants_replay is not None:
                publisher.replay(stream, changes)
            assert knows_all(stream, publisher)
            assert not stream.blocks.is_approximate


def test_a_gap_that_cannot_be_closed_makes_the_index_approximate_and_it_goes_on() -> None:
    publisher, stream = Publisher(kept=1), new_stream()
    publisher.replay(stream, Changes())
    stream.live(*publisher.prefill([1, 1, 1, 1]), Changes())
    assert not stream.blocks.is_approximate
    publisher.prefill([2, 2, 2, 2])
    stream.live(*publisher.prefill([3, 3, 3, 3]), Changes())
    assert stream.wants_replay == 1
    publisher.replay(stream, Changes())
    assert stream.blocks.is_approximate
    assert stream.num_lost == 1
    assert len(stream.blocks) == 2


def test_without_a_replay_socket_a_gap_is_owned_up_to_at_once() -> None:
    publisher, stream = Publisher(), new_stream(can_replay=False)
    publisher.prefill([1, 1, 1, 1])
    stream.live(*publisher.prefill([2, 2, 2, 2]), Changes())
    assert stream.wants_replay is None
    assert stream.blocks.is_approximate
    assert len(stream.blocks) == 1


def test_what_comes_live_during_a_replay_waits_and_is_not_counted_twice() -> None:
    publisher, stream, changes = Publisher(), new_stream(), Changes()
    first, second = publisher.prefill([1, 1, 1, 1]), publisher.prefill([1, 1, 1, 1, 2, 2, 2, 2])
    stream.live(*first, changes)
    stream.live(*second, changes)
    assert len(stream.blocks) == 0
    publisher.replay(stream, changes)
    assert knows_all(stream, publisher)
    assert list(changes.stored) == stream.blocks.hashes()


def test_an_engine_that_starts_again_has_an_empty_cache() -> None:
    old, stream = Publisher(), new_stream()
    for value in range(5):
        old.prefill([value] * 4)
    old.replay(stream, Changes())
    assert len(stream.blocks) == 5
    new, changes = Publisher(since=100.0), Changes()
    new.prefill([8] * 4)  # nobody hears of this one
    stream.live(*new.prefill([9] * 4), changes)
    assert changes.is_cleared
    new.replay(stream, changes)
    assert knows_all(stream, new)
    assert not stream.blocks.is_approximate


def test_a_message_that_cannot_be_read_is_lost_and_the_next_one_is_not() -> None:
    publisher, stream = Publisher(), new_stream(can_replay=False)
    stream.live(*publisher.prefill([1, 1, 1, 1]), Changes())
    publisher.prefill([2, 2, 2, 2])
    stream.live(1, b"\xc1", Changes())
    stream.live(*publisher.prefill([3, 3, 3, 3]), Changes())
    assert stream.num_lost == 1
    assert stream.blocks.is_approximate
    assert len(stream.blocks) == 2
