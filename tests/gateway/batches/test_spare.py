"""The rule of spare capacity, without a gateway."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.measurements import EngineLoad, ServingLimits
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.gateway.batches.spare import RowPace, Seen, room

LIMITS = ServingLimits(max_num_seqs=16, chunk_tokens=512, max_model_len=4096, kv_capacity_tokens=16_000)


def replica(num_running: int = 0, queued: int = 0, kv: int = 0, **more: object) -> ReplicaSnapshot:
    load = EngineLoad(num_running=num_running, queued_tokens=queued, kv_active_tokens=kv)
    return ReplicaSnapshot(id="r", limits=LIMITS, load=load, mean_output_tokens=0.0, **more)  # type: ignore[arg-type]


def rooms(*replicas: ReplicaSnapshot, ttft_s: float = 0.5) -> int:
    return room(replicas, ttft_s, busy=0.5, now=0.0)


def test_rows_have_the_part_of_each_replica_that_nobody_else_uses() -> None:
    assert rooms() == 0
    assert rooms(replica()) == 8
    assert rooms(replica(num_running=6)) == 2
    assert rooms(replica(num_running=8)) == 0
    assert rooms(replica(), replica(num_running=12)) == 8  # a full one takes nothing from another's
    assert rooms(replica(kv=8_001)) == 0
    assert rooms(replica(state=ReplicaState.DRAINING), replica(is_tripped=True)) == 0


def test_no_row_is_sent_where_a_first_token_would_be_late() -> None:
    assert rooms(replica(queued=499)) == 8  # 2000 tokens a second: a quarter of a second, half of what is promised
    assert rooms(replica(queued=502)) == 0
    assert rooms(replica(queued=502), ttft_s=1.0) == 8


def test_rows_do_not_make_steps_long_for_whoever_comes() -> None:
    assert rooms(replica(num_running=4, decode_tokens_per_s=200.0)) == 4  # a step takes 20 ms
    assert rooms(replica(num_running=6, decode_tokens_per_s=200.0)) == 0
    assert rooms(replica(num_running=6, decode_tokens_per_s=200.0), ttft_s=1.0) == 2


def test_rows_grow_one_by_one_while_there_is_room() -> None:
    pace = RowPace(max_in_flight=4)
    sent = []
    for _ in range(8):
        pace.tick(Seen(num_waiting=0, room=8))
        sent.append(pace.num_free)
        for _ in range(pace.num_free):
            pace.sent()
    assert sent == [1, 1, 1, 1, 0, 0, 0, 0]
    assert pace.in_flight == 4


def test_no_row_is_sent_while_anybody_else_waits_and_few_are_afterwards() -> None:
    pace = RowPace(max_in_flight=64)
    for _ in range(32):
        pace.tick(Seen(0, 64))
        while pace.num_free:
            pace.sent()
    assert pace.in_flight == 32
    pace.tick(Seen(num_waiting=1, room=64))
    assert pace.limit == 0
    for _ in range(31):
        pace.ended()
        assert pace.num_free == 0
    pace.tick(Seen(0, 64))
    assert pace.limit <= 16


def test_room_is_not_given_twice_between_two_looks() -> None:
    pace = RowPace(max_in_flight=64)
    for _ in range(20):
        pace.tick(Seen(0, 20))
        while pace.num_free:
            pace.sent()
    for _ in range(10):
        pace.ended()
    pace.tick(Seen(0, 2))
    assert [pace.num_free, pace.sent(), pace.num_free, pace.sent(), pace.num_free] == [2, None, 1, None, 0]


def test_one_row_calls_for_the_replicas_of_a_model_that_has_none() -> None:
    pace = RowPace(max_in_flight=64)
    pace.tick(Seen(0, 0))
    assert pace.num_free == 0
    pace.tick(Seen(0, 0, is_cold=True))
    assert pace.num_free == 1
    pace.sent()
    assert pace.num_free == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10), st.integers(0, 10), st.booleans())))
def test_rows_never_exceed_the_room_that_was_seen(looks: list[tuple[int, int, int, bool]]) -> None:
    pace = RowPace(max_in_flight=5)
    for num_waiting, seen_room, num_ended, is_refused in looks:
        before = pace.in_flight
        pace.tick(Seen(num_waiting, seen_room))
        num_sent = 0
        while pace.num_free:
            pace.sent()
            num_sent += 1
        assert num_sent <= (0 if num_waiting else seen_room)
        assert pace.in_flight <= max(5, before)
        for _ in range(min(num_ended, pace.in_flight)):
            pace.ended()
        if is_refused:
            pace.refused()
    for _ in range(pace.in_flight):
        pace.ended()
    pace.tick(Seen(0, 1))
    assert pace.num_free == 1  # never stuck
