"""Dynamic batching: which requests go together, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidRequest, Overloaded
from penstock.tensors.batcher import Batcher, BatchingRules, QueuePolicy, Waiting


def _batcher(**rules: object) -> Batcher[str]:
    return Batcher(BatchingRules(**{"max_batch_size": 8, "max_queue_delay_s": 0.1} | rules))  # type: ignore[arg-type]


def _take(batcher: Batcher[str], now_s: float) -> str | None:
    batch = batcher.take(now_s)
    return None if batch is None else "".join(one.payload for one in batch.requests)


def test_batch_that_is_full_is_due_at_once() -> None:
    batcher = _batcher(max_batch_size=3)
    for name in "abcd":
        batcher.add(name, 0.0)
    assert _take(batcher, 0.0) == "abc"
    assert _take(batcher, 0.0) is None
    assert batcher.next_change_s() == pytest.approx(0.1)
    assert batcher.next_change_s(is_busy=True) is None
    assert _take(batcher, 0.1) == "d"
    assert batcher.next_change_s() is None


def test_batch_that_the_next_request_does_not_fit_in_is_full() -> None:
    batcher = _batcher()
    for name, size in (("a", 5), ("b", 4), ("c", 1)):
        batcher.add(name, 0.0, size=size)
    assert _take(batcher, 0.0) == "a"  # c does not overtake b
    assert _take(batcher, 0.1) == "bc"


def test_preferred_size_is_taken_without_waiting() -> None:
    batcher = _batcher(preferred_batch_sizes=(2, 4))
    for name in "abc":
        batcher.add(name, 0.0)
    assert _take(batcher, 0.0) == "ab"
    for name in "def":
        batcher.add(name, 0.05)
    assert _take(batcher, 0.05) == "cdef"


def test_without_delay_whatever_waits_goes_together() -> None:
    batcher = _batcher(max_queue_delay_s=0.0)
    for name in "abc":
        batcher.add(name, 0.0)
    assert _take(batcher, 0.0) == "abc"


def test_requests_of_other_shapes_do_not_go_together_and_do_not_wait_for_each_other() -> None:
    batcher = _batcher(max_batch_size=2)
    for name, key in (("a", 1), ("b", 2), ("c", 2), ("d", 1)):
        batcher.add(name, 0.0, key=key)
    assert _take(batcher, 0.0) == "ad"
    assert _take(batcher, 0.0) == "bc"
    batcher.add("e", 0.0, key=1)
    for name in "fg":
        batcher.add(name, 0.0, key=2)
    assert _take(batcher, 0.0) == "fg"  # full, while e may still grow
    assert _take(batcher, 0.1) == "e"


def test_where_nothing_is_joined_each_request_is_a_batch() -> None:
    batcher = _batcher(joins=False, max_queue_delay_s=0.0)
    batcher.add("a", 0.0, size=3)
    batcher.add("b", 0.0)
    assert [_take(batcher, 0.0), _take(batcher, 0.0)] == ["a", "b"]


def test_first_level_goes_first_and_others_fill_its_batch() -> None:
    batcher = _batcher(max_batch_size=3, priority_levels=2, default_priority_level=2)
    batcher.add("a", 0.0)
    batcher.add("b", 0.0)
    batcher.add("c", 0.0, priority=1)
    batcher.add("d", 0.0, priority=1)
    assert _take(batcher, 0.0) == "cda"
    assert _take(batcher, 0.1) == "b"


def test_request_whose_time_is_over_is_refused_or_goes_last() -> None:
    batcher = _batcher(
        priority_levels=2, policies={2: QueuePolicy(8, default_timeout_s=0.05, rejects_late=False)}, max_batch_size=1
    )
    batcher.add("a", 0.0, timeout_s=0.02)
    batcher.add("b", 0.0, priority=2)
    assert batcher.next_change_s() == pytest.approx(0.0 + 0.02)
    assert [one.payload for one in batcher.expire(0.06)] == ["a"]
    batcher.add("c", 0.06, priority=2)
    batcher.add("d", 0.06, priority=1)
    assert [_take(batcher, 0.1), _take(batcher, 0.1), _take(batcher, 0.1)] == ["d", "c", "b"]
    assert not len(batcher)


def test_timeout_of_a_request_counts_where_it_may() -> None:
    policy = QueuePolicy(8, default_timeout_s=1.0, allow_timeout_override=False)
    batcher = _batcher(policy=policy)
    assert batcher.add("a", 0.0, timeout_s=0.01).deadline_s == 1.0
    assert _batcher().add("a", 0.0, timeout_s=0.01).deadline_s == 0.01


def test_bounds_refuse_and_change_nothing() -> None:
    batcher = _batcher(policy=QueuePolicy(2), priority_levels=2, max_queue_bytes=100)
    for wrong in ({"size": 0}, {"size": 9}, {"priority": 3}, {"priority": -1}):
        with pytest.raises(InvalidRequest):
            batcher.add("x", 0.0, **wrong)
    batcher.add("a", 0.0, num_bytes=300)  # alone, any size may wait
    with pytest.raises(Overloaded) as refused:
        batcher.add("b", 0.0, num_bytes=1)
    assert refused.value.reason == "max_queue_bytes"
    assert _take(batcher, 0.1) == "a"
    assert batcher.num_bytes == 0
    for name in "cd":
        batcher.add(name, 0.1)
    with pytest.raises(Overloaded) as refused:
        batcher.add("e", 0.1)
    assert refused.value.reason == "max_queue_size"
    batcher.add("f", 0.1, priority=2)
    assert len(batcher) == 3


def test_request_that_nobody_waits_for_is_forgotten() -> None:
    batcher = _batcher()
    one = batcher.add("a", 0.0, num_bytes=7)
    assert batcher.remove(one)
    assert not batcher.remove(one)
    assert (len(batcher), batcher.num_bytes) == (0, 0)


_REQUESTS = st.tuples(
    st.sampled_from(["add", "add", "add", "take", "wait", "drop"]),
    st.integers(1, 5),  # rows
    st.integers(1, 3),  # level
    st.integers(0, 2),  # key
    st.sampled_from([None, 0.01, 0.3]),  # timeout
)


@given(
    st.lists(_REQUESTS, max_size=60),
    st.integers(1, 6),
    st.lists(st.integers(1, 6), max_size=2),
    st.sampled_from([0.0, 0.05, 0.2]),
    st.booleans(),
)
def test_each_request_ends_once_in_order_within_bounds_and_delay(
    actions: list[tuple[str, int, int, int, float | None]],
    most: int,
    preferred: list[int],
    delay_s: float,
    rejects: bool,
) -> None:
    batcher: Batcher[int] = Batcher(
        BatchingRules(
            max_batch_size=most,
            preferred_batch_sizes=tuple(preferred),
            max_queue_delay_s=delay_s,
            priority_levels=3,
            policy=QueuePolicy(max_queue_size=4, rejects_late=rejects),
        )
    )
    now_s, number = 0.0, 0
    waiting: dict[int, Waiting[int]] = {}
    ended: list[int] = []

    def take() -> bool:
        for one in batcher.expire(now_s):
            assert rejects
            assert one.deadline_s is not None
            assert one.deadline_s <= now_s + 1e-5
            ended.append(one.payload)
            del waiting[one.payload]
        batch = batcher.take(now_s)
        if batch is None:
            # Nothing is due: nobody who is first of its shape has waited for the delay.
            firsts = {one.key: one for one in reversed(waiting.values())}
            assert all(now_s < one.arrived_s + delay_s for one in firsts.values())
            assert not waiting or batcher.next_change_s() is not None
            return False
        assert 1 <= batch.size <= most
        assert batch.size == sum(one.size for one in batch.requests)
        assert len({one.key for one in batch.requests}) == 1
        for one in batch.requests:
            ended.append(one.payload)
            del waiting[one.payload]
        for one in batch.requests:  # nobody of the same shape and level is overtaken
            for other in waiting.values():
                is_same = (other.key, other.level, other.is_late) == (one.key, one.level, one.is_late)
                assert not (is_same and other.payload < one.payload)
        return True

    for action, size, level, key, timeout_s in actions:
        if action == "add":
            before = len(batcher)
            try:
                one = batcher.add(number, now_s, size=size, key=key, priority=level, timeout_s=timeout_s)
            except (InvalidRequest, Overloaded):
                assert size > most or batcher.num_at(level) >= 4
                assert len(batcher) == before
            else:
                waiting[number] = one
                number += 1
        elif action == "take":
            take()
        elif action == "drop" and waiting:
            one = waiting.pop(next(iter(waiting)))
            assert batcher.remove(one)
            ended.append(one.payload)
        else:
            now_s += 0.04
        assert len(batcher) == len(waiting)
    now_s += 10.0
    while take():
        pass
    assert sorted(ended) == list(range(number))
    assert not len(batcher)
    assert batcher.num_bytes == 0
