from penstock.core.replica import ReplicaSnapshot, ReplicaState
from tests.snapshots import snapshot


def test_what_nobody_has_heard_of_for_a_while_is_degraded_and_then_out_but_never_idle() -> None:
    replica = ReplicaSnapshot(id="a", taken_at=100.0)
    assert replica.state_at(100.9) is ReplicaState.READY
    assert replica.state_at(101.1) is ReplicaState.DEGRADED
    assert replica.state_at(131.0) is ReplicaState.OUT
    patient = ReplicaSnapshot(id="a", taken_at=100.0, stale_after_s=20.0)
    assert (patient.state_at(120.0), patient.state_at(121.0)) == (ReplicaState.READY, ReplicaState.DEGRADED)


def test_age_does_not_bring_back_what_is_out_or_draining() -> None:
    for state in (ReplicaState.OUT, ReplicaState.DRAINING):
        assert ReplicaSnapshot(id="a", taken_at=0.0, state=state).state_at(5.0) is state


def test_what_was_sent_since_the_snapshot_counts_as_load() -> None:
    replica = snapshot(
        id="a",
        num_running=2,
        num_waiting=1,
        queued_tokens=100,
        kv_capacity_tokens=10_000,
        kv_active_tokens=1000,
        mean_output_tokens=100,
    )
    sent = replica.with_sent(3, 600, 900)
    assert (sent.sequences, sent.prefill_queued) == (6, 700)
    assert sent.kv_used_tokens == 1000 + 100 + 2 * 50 + 900


def test_prompts_that_wait_at_a_replica_will_take_their_blocks() -> None:
    """They hold none yet, and no room is left for others all the same."""
    replica = snapshot(id="a", num_waiting=1, queued_tokens=8000, kv_capacity_tokens=10_000)
    assert replica.kv_used_tokens == 8000


def test_more_seen_to_end_than_the_snapshot_knew_of_is_not_less_than_nothing() -> None:
    sent = ReplicaSnapshot(id="a").with_sent(-3, -600, -900)
    assert (sent.sequences, sent.prefill_queued, sent.kv_used_tokens) == (0, 0, 0)
