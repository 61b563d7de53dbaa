import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineSpeeds, ServingLimits
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.health.replica_health import ReplicaHealth
from penstock.health.settings import HealthSettings
from penstock.health.slow_start import SlowStart
from tests.snapshots import snapshot

SAID = ReplicaSnapshot(id="a")
SILENT = ReplicaSnapshot(id="a", reports=False)
GONE = ReplicaSnapshot(id="a", state=ReplicaState.OUT)


def state(health: ReplicaHealth, said: ReplicaSnapshot = SAID, now: float = 0.0) -> ReplicaState:
    return health.mark(said, now).state


def share(health: ReplicaHealth, now: float, said: ReplicaSnapshot = SAID) -> float:
    return round(health.mark(said, now).share, 2)


def report(steps: int, num_running: int = 1, *, num_open: int = 0, speed: float = 1000.0) -> EngineMeasurements:
    return EngineMeasurements(
        EngineLoad(num_open, num_running=num_running, steps=steps),
        limits=ServingLimits(chunk_tokens=500),
        speeds=EngineSpeeds(speed, decode_step_s=0.1),
    )


def test_reports_are_stale_after_a_third_of_the_silence_and_never_before_four_polls() -> None:
    assert [HealthSettings(silent_after_s=s).stale_after_s for s in (0.5, 3.0, 60.0)] == [1.0, 1.0, 20.0]


def test_one_that_is_there_from_the_first_is_not_cold_and_one_that_comes_later_is() -> None:
    assert share(ReplicaHealth(), 0.0) == 1.0
    late = ReplicaHealth()
    assert state(late, GONE) is ReplicaState.OUT
    assert [share(late, 1.0 + s) for s in (0, 10, 20, 30, 99)] == [0.1, 0.4, 0.7, 1.0, 1.0]


def test_one_that_comes_back_starts_slowly() -> None:
    health = ReplicaHealth()
    health.mark(SAID, 0.0)
    health.mark(GONE, 5.0)
    assert share(health, 10.0) == 0.1


def test_a_server_without_reports_is_out_until_it_was_asked_and_not_cold_then() -> None:
    health = ReplicaHealth()
    health.await_probe()
    assert state(health, SILENT) is ReplicaState.OUT
    health.probed(True)
    assert state(health, SILENT) is ReplicaState.READY
    assert share(health, 0.0, SILENT) == 1.0


def test_three_failures_in_a_row_are_out_and_two_successes_back_with_a_slow_start() -> None:
    health = ReplicaHealth()
    for is_well in (False, False, True, False, False):
        health.probed(is_well)
    assert state(health) is ReplicaState.READY
    health.probed(False)
    assert state(health) is ReplicaState.OUT
    health.probed(True)
    assert state(health) is ReplicaState.OUT
    health.probed(True)
    assert state(health, now=4.0) is ReplicaState.READY
    assert share(health, 4.0) == 0.1


@given(st.lists(st.booleans(), max_size=60))
def test_in_and_out_by_any_sequence_of_probes(outcomes: list[bool]) -> None:
    health, is_in, passed, failed = ReplicaHealth(), False, 1, 0
    health.await_probe()
    for outcome in outcomes:
        health.probed(outcome)
        passed, failed = (passed + 1, 0) if outcome else (0, failed + 1)
        is_in = (is_in or passed >= 2) and failed < 3
        assert (state(health) is ReplicaState.READY) == is_in


def test_what_it_says_of_itself_stands_while_nothing_speaks_against_it() -> None:
    draining = snapshot(id="a", state=ReplicaState.DRAINING, num_running=3)
    health = ReplicaHealth()
    for _ in range(5):
        attempt = health.breaker.begin(2.0)
        assert attempt is not None
        attempt.failed(2.0)
    marked = health.mark(draining, 2.0)
    assert (marked.state, marked.is_tripped, marked.load.num_running) == (ReplicaState.DRAINING, True, 3)
    assert not health.mark(draining, 7.0).is_tripped


def test_a_replica_that_answers_but_makes_no_steps_is_out_until_it_made_tokens() -> None:
    health = ReplicaHealth()
    found = [health.hangs(report(70), second / 4) for second in range(60)]
    assert found.index(True) == 40  # after ten seconds
    assert found.count(True) == 1
    assert state(health) is ReplicaState.OUT
    health.probed(True)
    assert state(health) is ReplicaState.OUT
    health.probed(True)
    assert state(health, now=13.0) is ReplicaState.READY
    assert share(health, 13.0) == 0.1
    assert not health.hangs(report(72), 13.0)


@pytest.mark.parametrize(("num_running", "steps_per_s"), [(0, 0), (3, 1)])
def test_who_is_idle_or_steps_does_not_hang(num_running: int, steps_per_s: int) -> None:
    health = ReplicaHealth()
    assert not any(health.hangs(report(second * steps_per_s, num_running), float(second)) for second in range(100))


def test_one_that_stands_still_is_degraded_before_it_counts_as_hung() -> None:
    health = ReplicaHealth()
    states = []
    for second in range(12):
        health.hangs(report(70), float(second))
        states.append(state(health, now=float(second)))
    assert states == [ReplicaState.READY] * 3 + [ReplicaState.DEGRADED] * 7 + [ReplicaState.OUT] * 2
    recovering = ReplicaHealth()
    for second, steps in enumerate((70, 70, 70, 70, 71)):
        recovering.hangs(report(steps), float(second))
    assert state(recovering) is ReplicaState.READY


def test_work_that_the_engine_has_not_taken_counts_too() -> None:
    health = ReplicaHealth()
    assert any(health.hangs(report(7, 0, num_open=1), float(second)) for second in range(12))


def test_a_slow_machine_has_the_time_its_steps_take_and_a_new_one_more() -> None:
    def found_after_s(speed: float = 1000.0) -> int:
        health = ReplicaHealth()
        return next(second for second in range(1000) if health.hangs(report(7, speed=speed), float(second)))

    assert found_after_s() == 10
    assert found_after_s(speed=100.0) == 21  # four steps of 500 tokens
    assert found_after_s(speed=0.0) == 60  # nothing measured yet


def test_a_long_idle_replica_has_the_whole_time_for_its_first_step() -> None:
    health = ReplicaHealth()
    assert not health.hangs(report(5, 0), 0.0)
    assert not health.hangs(report(5, 0), 100.0)
    assert not health.hangs(report(5, 1), 105.0)
    assert health.hangs(report(5, 1), 110.0)


@given(st.lists(st.floats(0, 60), min_size=1, max_size=20))
def test_a_share_only_grows(times: list[float]) -> None:
    ramp = SlowStart()
    ramp.begin(0.0)
    shares = [ramp.share(now) for now in sorted(times)]
    assert shares == sorted(shares)
    assert all(0.1 <= share <= 1.0 for share in shares)
