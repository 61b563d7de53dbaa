import timeit
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.router.pickers import best, power_of_two
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from tests.snapshots import snapshot

draws = st.floats(0, 1, exclude_max=True)


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(id=name, models=("m",), **facts)


def request(**facts: Any) -> EdgeRequest:
    return EdgeRequest("q", "m", **{"prompt_tokens": 100, "max_tokens": 100, **facts})


def picked(replicas: list[ReplicaSnapshot], now: float = 0.0, **facts: Any) -> str | None:
    choice = Router().pick(request(**facts), replicas, now)
    return choice.replica.id if choice.replica else None


def test_each_dropped_replica_has_the_reason_of_the_first_filter_it_fails() -> None:
    choice = Router().pick(
        request(avoid=frozenset({"tried"}), allowed=frozenset({"tried", "short"})),
        [
            ReplicaSnapshot(id="other", models=("x",)),
            replica("out", state=ReplicaState.OUT),
            replica("draining", state=ReplicaState.DRAINING),
            replica("tripped", is_tripped=True),
            replica("short", max_model_len=150),
            replica("small", kv_capacity_tokens=150),
            replica("tried"),
            replica("forbidden"),
        ],
        now=0.0,
    )
    assert choice.replica is None
    assert choice.dropped == {
        "other": "other_model",
        "out": "not_ready",
        "draining": "not_ready",
        "tripped": "breaker_open",
        "short": "context_too_short",
        "small": "context_too_short",
        "tried": "not_allowed",
        "forbidden": "not_allowed",
    }


def test_a_choice_carries_what_every_candidate_scored() -> None:
    choice = Router().pick(request(session="s"), [replica("a"), replica("b", queued_tokens=900)], 0.0)
    assert [c.id for c in choice.candidates] == ["a", "b"]
    assert set(choice.scores) == {"least_loaded", "session"}
    assert all(0 <= score <= 1 for scores in choice.scores.values() for score in scores)
    assert sorted(choice.scores["session"]) == [0.0, 1.0]
    expected = [load + 2 * session for load, session in zip(*choice.scores.values(), strict=True)]
    assert choice.totals == pytest.approx(expected)


def test_queued_prefill_counts_by_each_replicas_own_speed() -> None:
    slow = replica("slow", queued_tokens=1000, prefill_tokens_per_s=500.0)
    fast = replica("fast", queued_tokens=3000, prefill_tokens_per_s=5000.0)
    assert picked([slow, fast]) == "fast"


def test_decode_counts_apart_from_prefill() -> None:
    decoding = replica("decoding", num_running=100, decode_tokens_per_s=1000.0)
    assert picked([decoding, replica("idle")]) == "idle"
    assert picked([decoding, replica("prefilling", queued_tokens=5000)]) == "decoding"


def test_a_replica_whose_places_or_kv_are_taken_is_the_last_choice() -> None:
    full = replica("full", num_running=8, max_num_seqs=8)
    tight = replica("tight", kv_capacity_tokens=10_000, kv_active_tokens=9800)
    busy = replica("busy", queued_tokens=150)
    assert picked([full, busy]) == picked([tight, busy]) == "busy"


def test_a_burst_between_two_snapshots_is_spread() -> None:
    replicas = {name: replica(name) for name in "abcd"}
    sent: Counter[str] = Counter()
    for _ in range(40):
        name = picked(list(replicas.values()))
        assert name is not None
        sent[name] += 1
        replicas[name] = replicas[name].with_sent(sent[name], 100 * sent[name], 200 * sent[name])
    assert set(sent.values()) == {10}


def test_stale_replicas_are_used_only_when_no_fresh_one_is_left() -> None:
    stale, fresh = replica("stale", taken_at=0.0), replica("fresh", taken_at=5.0, queued_tokens=9000)
    assert picked([stale, fresh], now=5.0) == "fresh"
    assert picked([stale], now=5.0) == "stale"
    assert picked([stale], now=50.0) is None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_replica_in_slow_start_gets_its_share_of_an_equal_part(share: float) -> None:
    replicas = [replica("a"), replica("b"), replica("c"), replica("new", share=share)]
    count = sum(picked(replicas, random01=i / 4000) == "new" for i in range(4000))
    assert count / 1000 == pytest.approx(share, abs=0.1)
    assert picked([replica("new", share=share)], random01=0.99) == "new"


def test_equal_replicas_share_by_the_draw() -> None:
    counts = Counter(best([0.5, 0.7, 0.7, 0.7], i / 300) for i in range(300))
    assert counts == {1: 100, 2: 100, 3: 100}


@given(totals=st.lists(st.floats(0, 3), min_size=1, max_size=20), random01=draws)
def test_every_picker_picks_one_that_is_there(totals: list[float], random01: float) -> None:
    assert totals[best(totals, random01)] == max(totals)
    assert 0 <= power_of_two(totals, random01) < len(totals)


def test_power_of_two_draws_every_pair_alike_and_takes_the_better() -> None:
    counts = Counter(power_of_two([0.1, 0.2, 0.3, 0.4], i / 1200) for i in range(1200))
    assert counts == {3: 600, 2: 400, 1: 200}


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize(("count", "limit_us"), [(4, 10), (100, 200)])
def test_a_pick_is_fast(count: int, limit_us: float) -> None:
    """Twice the aim: the machine that runs this is shared."""
    replicas = [replica(f"r{i}", num_running=i % 20, queued_tokens=(i * 37) % 500) for i in range(count)]
    router, asked = Router(), request(session="somebody")
    seconds = min(timeit.repeat(lambda: router.pick(asked, replicas, 0.0), number=200, repeat=20)) / 200
    assert seconds * 1e6 < 2 * limit_us
