from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from penstock.core.replica import ReplicaSnapshot
from penstock.router.request import EdgeRequest
from penstock.router.scorers import least_loaded, session_affinity
from tests.snapshots import snapshot

numbers = st.integers(-5000, 5000)
snapshots = st.builds(
    snapshot,
    id=st.text(max_size=4),
    num_running=st.integers(0, 500),
    num_waiting=st.integers(0, 500),
    queued_tokens=st.integers(0, 10**6),
    kv_active_tokens=st.integers(0, 10**6),
    kv_capacity_tokens=st.integers(1, 10**6),
    prefill_tokens_per_s=st.floats(0.1, 1e6),
    decode_tokens_per_s=st.floats(0.1, 1e6),
    max_num_seqs=st.integers(1, 500),
    sent_sequences=numbers,
    sent_prefill_tokens=numbers,
    sent_kv_tokens=numbers,
)
requests = st.builds(
    EdgeRequest,
    id=st.just("q"),
    model=st.just("m"),
    prompt_tokens=st.integers(1, 10**5),
    max_tokens=st.integers(1, 10**5),
    session=st.none() | st.text(max_size=5),
)


def owner(session: str, replicas: list[ReplicaSnapshot]) -> str:
    scores = session_affinity()(EdgeRequest("q", "m", 1, 1, session=session), replicas)
    assert scores is not None
    return replicas[scores.index(1.0)].id


@given(request=requests, replicas=st.lists(snapshots, min_size=1, max_size=6))
def test_every_scorer_stays_in_its_range(request: EdgeRequest, replicas: list[ReplicaSnapshot]) -> None:
    for scorer in (least_loaded, session_affinity()):
        scores = scorer(request, replicas)
        if scores is None:
            assert scorer is not least_loaded
            assert request.session is None
            continue
        assert len(scores) == len(replicas)
        assert all(0.0 <= score <= 1.0 for score in scores)


def test_sessions_spread_evenly_and_stay() -> None:
    replicas = [ReplicaSnapshot(id=f"r{i}") for i in range(4)]
    counts = Counter(owner(f"user-{i}", replicas) for i in range(4000))
    assert all(850 < count < 1150 for count in counts.values())
    assert all(owner(f"user-{i}", replicas) == owner(f"user-{i}", replicas[::-1]) for i in range(100))


def test_a_replica_that_leaves_moves_only_its_own_sessions_and_to_all_others() -> None:
    replicas = [ReplicaSnapshot(id=f"r{i}") for i in range(5)]
    before = {f"user-{i}": owner(f"user-{i}", replicas) for i in range(2000)}
    after = {session: owner(session, replicas[1:]) for session in before}
    assert all(after[session] == name for session, name in before.items() if name != "r0")
    moved = Counter(after[session] for session, name in before.items() if name == "r0")
    assert all(60 < moved[f"r{i}"] < 140 for i in range(1, 5))


def test_bounded_load_passes_a_busy_owner_over_for_the_next_of_the_session() -> None:
    replicas = [snapshot(id=f"r{i}", num_running=10) for i in range(4)]
    first = owner("somebody", replicas)
    busy = [snapshot(id=r.id, num_running=40 if r.id == first else 10) for r in replicas]
    second = owner("somebody", busy)
    assert second == owner("somebody", [r for r in replicas if r.id != first])


def test_at_low_load_a_session_is_not_scattered() -> None:
    replicas = [ReplicaSnapshot(id=f"r{i}") for i in range(4)]
    first = owner("somebody", replicas)
    talking = [snapshot(id=r.id, num_running=3 if r.id == first else 0) for r in replicas]
    assert owner("somebody", talking) == first
