import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.gateway.health.replica_health import ReplicaHealth
from penstock.gateway.health.slow_start import SlowStart
from penstock.gateway.health.watchdog import Watchdog


def well(now: float = 0.0) -> ReplicaHealth:
    health = ReplicaHealth(is_known=True)
    health.probe_passed(now)
    return health


def test_a_new_replica_is_out_until_a_probe_passes_and_then_ramps_up() -> None:
    health = ReplicaHealth()
    assert health.state(0.0, 0.0) is ReplicaState.OUT
    health.probe_passed(1.0)
    assert health.state(1.0, 1.0) is ReplicaState.READY
    assert [round(health.share(1.0 + s), 2) for s in (0, 10, 20, 30, 99)] == [0.1, 0.4, 0.7, 1.0, 1.0]


def test_a_replica_that_ran_before_the_gateway_did_is_not_cold() -> None:
    assert well().share(0.0) == 1.0


def test_three_failures_in_a_row_are_out_and_two_successes_back_with_a_slow_start() -> None:
    health = well()
    for _ in range(2):
        health.probe_failed(1.0)
    health.probe_passed(1.5)
    for _ in range(2):
        health.probe_failed(2.0)
    assert health.state(2.0, 2.0) is ReplicaState.READY
    health.probe_failed(2.0)
    assert health.state(2.0, 2.0) is ReplicaState.OUT
    health.probe_passed(3.0)
    assert health.state(3.0, 3.0) is ReplicaState.OUT
    health.probe_passed(4.0)
    assert health.state(4.0, 4.0) is ReplicaState.READY
    assert health.share(4.0) == pytest.approx(0.1)


@given(st.lists(st.booleans(), max_size=60))
def test_in_and_out_by_any_sequence_of_probes(outcomes: list[bool]) -> None:
    health, is_in, passed, failed = ReplicaHealth(), False, 1, 0
    for outcome in outcomes:
        (health.probe_passed if outcome else health.probe_failed)(0.0)
        passed, failed = (passed + 1, 0) if outcome else (0, failed + 1)
        is_in = (is_in or passed >= 2) and failed < 3
        assert (health.state(0.0, 0.0) is ReplicaState.READY) == is_in


def test_what_says_that_it_drains_is_not_failing() -> None:
    health = well()
    for _ in range(10):
        health.draining()
    assert health.state(0.0, 0.0) is ReplicaState.DRAINING
    health.probe_passed(1.0)
    assert health.state(1.0, 1.0) is ReplicaState.READY


def test_old_numbers_and_a_breaker_that_is_not_closed_mean_degraded() -> None:
    health = well()
    assert health.state(taken_at=0.0, now=1.5) is ReplicaState.DEGRADED
    assert health.state(taken_at=0.0, now=31.0) is ReplicaState.OUT
    for _ in range(5):
        attempt = health.breaker.begin(2.0)
        assert attempt is not None
        attempt.failed(2.0)
    marked = health.mark(ReplicaSnapshot(id="a", taken_at=2.0, running=3), 2.0)
    assert (marked.state, marked.is_tripped, marked.running) == (ReplicaState.DEGRADED, True, 3)
    assert not health.mark(marked, 7.0).is_tripped


def test_a_replica_that_answers_but_makes_no_tokens_is_out_until_it_makes_one() -> None:
    health = well()
    for second in range(12):
        health.probe_passed(float(second))
        health.watchdog.observe(sequences=3, steps=70, now=float(second))
    assert health.state(11.0, 11.0) is ReplicaState.OUT
    assert health.needs_deep_probe
    for _ in range(5):
        health.probe_passed(12.0)
    assert health.state(12.0, 12.0) is ReplicaState.OUT
    health.deep_probe_passed(13.0)
    assert health.state(13.0, 13.0) is ReplicaState.READY
    assert health.share(13.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("sequences", "steps_per_s", "token_every_s"), [(0, 0, 0), (3, 1, 0), (3, 0, 5)])
def test_who_is_idle_or_steps_or_sends_tokens_is_not_hung(sequences: int, steps_per_s: int, token_every_s: int) -> None:
    watchdog = Watchdog()
    for second in range(100):
        if token_every_s and second % token_every_s == 0:
            watchdog.saw_token(float(second))
        assert not watchdog.observe(sequences, second * steps_per_s, float(second))


def test_a_long_idle_replica_has_the_whole_time_for_its_first_step() -> None:
    watchdog = Watchdog(hung_after_s=10.0)
    watchdog.observe(0, 5, 0.0)
    watchdog.observe(0, 5, 100.0)
    assert not watchdog.observe(1, 5, 105.0)
    assert watchdog.observe(1, 5, 110.0)


@given(st.lists(st.floats(0, 60), min_size=1, max_size=20))
def test_a_share_only_grows(times: list[float]) -> None:
    ramp = SlowStart()
    ramp.begin(0.0)
    shares = [ramp.share(now) for now in sorted(times)]
    assert shares == sorted(shares)
    assert all(0.1 <= share <= 1.0 for share in shares)
