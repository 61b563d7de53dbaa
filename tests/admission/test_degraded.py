"""What is old is not idle: numbers that nobody confirms any more attract no work."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from penstock.admission.admission import Admission
from penstock.admission.decision import Admit, Queued
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.router.request import EdgeRequest
from tests.snapshots import snapshot

NOW = 100.0
fresh_loads = st.builds(
    snapshot,
    id=st.sampled_from(["b", "c", "d"]),
    models=st.just(("m",)),
    taken_at=st.floats(NOW - 0.9, NOW),
    num_running=st.integers(0, 30),
    queued_tokens=st.integers(0, 1500),
    kv_active_tokens=st.integers(0, 50_000),
    kv_capacity_tokens=st.just(100_000),
    max_num_seqs=st.just(32),
    share=st.sampled_from([0.1, 1.0]),
)
sick = st.one_of(
    st.builds(ReplicaSnapshot, id=st.just("a"), models=st.just(("m",)), taken_at=st.floats(NOW - 29, NOW - 1.1)),
    st.just(ReplicaSnapshot(id="a", models=("m",), taken_at=NOW, state=ReplicaState.DEGRADED)),
)


def request(random01: float, session: str | None = None, number: int = 0) -> EdgeRequest:
    return EdgeRequest(
        id=f"r{number}", model="m", prompt_tokens=100, max_tokens=100, random01=random01, session=session, tenant="t"
    )


@given(
    sick,
    st.lists(fresh_loads, min_size=1, max_size=3, unique_by=lambda r: r.id),
    st.floats(0, 0.999),
    st.none() | st.text(max_size=3),
)
def test_a_degraded_replica_gets_nothing_while_a_ready_one_has_room(
    old: ReplicaSnapshot, ready: list[ReplicaSnapshot], random01: float, session: str | None
) -> None:
    alone, together = Admission(), Admission()
    for replica in ready:
        alone.replica_changed(replica)
        together.replica_changed(replica)
    together.replica_changed(old)
    decision = together.submit(request(random01, session), NOW)
    if isinstance(alone.submit(request(random01, session), NOW), Admit):
        assert isinstance(decision, Admit)
        assert decision.replica_id != "a"


@given(sick, st.floats(0, 0.999))
def test_it_takes_over_what_has_no_room_elsewhere(old: ReplicaSnapshot, random01: float) -> None:
    admission = Admission()
    admission.replica_changed(old)
    admission.replica_changed(snapshot(id="b", models=("m",), taken_at=NOW, num_running=8, max_num_seqs=8))
    decision = admission.submit(request(random01), NOW)
    assert isinstance(decision, Admit)
    assert decision.replica_id == "a"


def test_one_that_fell_silent_for_long_is_not_waited_for() -> None:
    admission = Admission()
    admission.replica_changed(ReplicaSnapshot(id="a", models=("m",), taken_at=NOW - 60))
    admission.replica_changed(snapshot(id="b", models=("m",), taken_at=NOW, num_running=8, max_num_seqs=8))
    assert isinstance(admission.submit(request(0.5), NOW), Queued)
