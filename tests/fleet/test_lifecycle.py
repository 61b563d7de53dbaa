"""The life of a replica, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.api.replica_report import ReplicaReport
from penstock.core.measurements import EngineLoad, EngineMeasurements
from penstock.fleet.drivers.driver import DriverReplica
from penstock.fleet.lifecycle import SILENT_S, Command, Facts, advance
from penstock.fleet.policy.observation import ReplicaState as S
from penstock.fleet.settings import PoolSettings
from penstock.tenancy.fleet import FleetReplica

SETTINGS = PoolSettings(start_timeout_s=100.0, drain_timeout_s=50.0)
LISTED = DriverReplica("r", "p", "http://127.0.0.1:1")


def row(state: S, target: S = S.ACTIVE, **more: object) -> FleetReplica:
    return replace(FleetReplica("r", "p", state, 0.0, target=target, url="http://127.0.0.1:1"), **more)


def report(state: str = "ready", num_open: int = 0, *, can_park: bool = True) -> ReplicaReport:
    measured = EngineMeasurements(EngineLoad(num_open=num_open))
    return ReplicaReport("boot", "m", state, can_park=can_park, measured=measured)


def test_replica_is_active_only_after_a_real_token() -> None:
    starting = row(S.STARTING, url="")
    assert advance(starting, Facts(), SETTINGS, 1.0).command is Command.START
    loading = advance(starting, Facts(LISTED, report("starting"), 2.0), SETTINGS, 2.0)
    assert loading.row is not None
    assert loading.row.url == LISTED.url
    assert loading.command is None
    ready = advance(loading.row, Facts(LISTED, report(), 3.0), SETTINGS, 3.0)
    assert ready.row is not None
    assert (ready.row.state, ready.command) == (S.STARTING, Command.PROBE)
    wrong = advance(ready.row, Facts(LISTED, report(), 4.0, Command.PROBE, "no token"), SETTINGS, 4.0)
    assert wrong.command is Command.PROBE
    proven = advance(ready.row, Facts(LISTED, report(), 5.0, Command.PROBE), SETTINGS, 5.0)
    assert proven.row is not None
    assert (proven.row.state, proven.row.ready_at) == (S.ACTIVE, 5.0)


def test_replica_of_a_warm_pool_waits_in_standby_and_is_active_at_once_when_wanted() -> None:
    ready = advance(row(S.STARTING, S.STANDBY), Facts(LISTED, report(), 5.0, Command.PROBE), SETTINGS, 5.0)
    assert ready.row is not None
    assert ready.row.state == S.STANDBY
    active = advance(replace(ready.row, target=S.ACTIVE), Facts(LISTED, report(), 6.0), SETTINGS, 6.0)
    assert active.row is not None
    assert (active.row.state, active.command) == (S.ACTIVE, None)


@pytest.mark.parametrize(
    ("target", "state", "command"),
    [(S.STOPPING, S.STOPPING, Command.STOP), (S.PARKED, S.STANDBY, None), (S.STANDBY, S.STANDBY, None)],
)
def test_active_replica_leaves_when_its_last_stream_has_ended(target: S, state: S, command: Command | None) -> None:
    draining = advance(row(S.ACTIVE, target), Facts(LISTED, report(num_open=2), 1.0), SETTINGS, 1.0)
    assert draining.row is not None
    assert (draining.row.state, draining.command) == (S.DRAINING, None)
    busy = advance(draining.row, Facts(LISTED, report(num_open=1), 20.0), SETTINGS, 20.0)
    assert busy.row == draining.row
    assert busy.command is None
    idle = advance(draining.row, Facts(LISTED, report(), 21.0), SETTINGS, 21.0)
    assert idle.row is not None
    assert (idle.row.state, idle.command) == (state, command)


def test_gateways_hear_of_a_drain_before_an_idle_replica_goes() -> None:
    draining = row(S.DRAINING, S.STOPPING, since=10.0)
    assert advance(draining, Facts(LISTED, report(), 10.5), SETTINGS, 10.5).row == draining


@pytest.mark.parametrize("can_park", [True, False])
def test_replica_that_cannot_be_parked_stays_in_standby(can_park: bool) -> None:
    waiting = row(S.STANDBY, S.PARKED)
    found = advance(waiting, Facts(LISTED, report(can_park=can_park), 1.0), SETTINGS, 1.0)
    assert found.row is not None
    assert (found.row.state, found.row.target, found.command) == (
        (S.PARKING, S.PARKED, Command.PARK) if can_park else (S.STANDBY, S.STANDBY, None)
    )
    assert advance(waiting, Facts(LISTED, None, 1.0), SETTINGS, 1.0).row == waiting  # it has not said yet


def test_draining_replica_that_is_wanted_again_stays() -> None:
    found = advance(row(S.DRAINING, S.ACTIVE), Facts(LISTED, report(num_open=3), 5.0), SETTINGS, 5.0)
    assert found.row is not None
    assert found.row.state == S.ACTIVE


def test_busy_replica_is_parked_never_and_stopped_when_its_time_is_up() -> None:
    late = Facts(LISTED, report(num_open=1), 51.0)
    assert advance(row(S.DRAINING, S.PARKED), late, SETTINGS, 51.0).command is None
    assert advance(row(S.DRAINING, S.STOPPING), late, SETTINGS, 51.0).command is Command.STOP


def test_interrupted_replica_is_gone_before_its_deadline() -> None:
    noticed = advance(row(S.ACTIVE), Facts(replace_listed(deadline_s=30.0), report(num_open=1), 1.0), SETTINGS, 1.0)
    assert noticed.row is not None
    assert noticed.row.deadline == 31.0
    draining = replace(noticed.row, state=S.DRAINING, target=S.STOPPING)
    assert advance(draining, Facts(LISTED, report(num_open=1), 25.0), SETTINGS, 25.0).command is None
    assert advance(draining, Facts(LISTED, report(num_open=1), 29.5), SETTINGS, 29.5).command is Command.STOP


def test_parked_replica_wakes_and_is_active_after_standby() -> None:
    waking = advance(row(S.PARKED), Facts(LISTED, report("parked"), 1.0), SETTINGS, 1.0)
    assert waking.row is not None
    assert (waking.row.state, waking.command) == (S.WAKING, Command.WAKE)
    awake = advance(waking.row, Facts(LISTED, report(), 2.0, Command.WAKE), SETTINGS, 2.0)
    assert awake.row is not None
    assert awake.row.state == S.STANDBY


@pytest.mark.parametrize(("state", "command"), [(S.PARKING, Command.PARK), (S.WAKING, Command.WAKE)])
def test_replica_whose_change_of_state_failed_is_stopped(state: S, command: Command) -> None:
    found = advance(row(state, S.PARKED), Facts(LISTED, report(), 1.0, command, "out of memory"), SETTINGS, 1.0)
    assert found.row is not None
    assert (found.row.state, found.command) == (S.STOPPING, Command.STOP)
    assert found.failure == "out of memory"


@pytest.mark.parametrize(
    ("facts", "now", "words"),
    [
        (Facts(DriverReplica("r", "p", failure="exit 1"), None, 1.0), 1.0, "exit 1"),
        (Facts(LISTED, None, 1.0), SILENT_S + 2.0, "has not answered"),
        (Facts(None, None, 40.0), 40.0, "no longer has it"),
        (Facts(LISTED, report("failed"), 1.0), 1.0, "engine has failed"),
    ],
)
def test_lost_replica_is_stopped_with_the_reason(facts: Facts, now: float, words: str) -> None:
    found = advance(row(S.ACTIVE), facts, SETTINGS, now)
    assert found.row is not None
    assert (found.row.state, found.command) == (S.STOPPING, Command.STOP)
    assert words in found.failure


def test_start_that_takes_too_long_has_failed() -> None:
    slow = Facts(LISTED, report("starting"), 100.0)
    assert advance(row(S.STARTING), slow, SETTINGS, 100.0).failure == ""
    assert "not ready" in advance(row(S.STARTING), slow, SETTINGS, 101.0).failure


def test_row_goes_when_its_process_is_gone() -> None:
    assert advance(row(S.STOPPING), Facts(LISTED), SETTINGS, 1.0).command is Command.STOP
    assert advance(row(S.STOPPING), Facts(None, done=Command.STOP), SETTINGS, 1.0).row is None
    again = advance(row(S.STOPPING), Facts(LISTED, done=Command.STOP, failure="busy"), SETTINGS, 1.0)
    assert again.command is Command.STOP


FACTS = st.builds(
    Facts,
    st.none() | st.just(LISTED) | st.just(DriverReplica("r", "p", failure="gone")),
    st.none() | st.builds(report, st.sampled_from(["starting", "ready", "parked", "failed"]), st.integers(0, 2)),
    st.floats(0, 200),
    st.none() | st.sampled_from(Command),
    st.sampled_from(["", "it failed"]),
)


def test_replica_that_no_node_takes_is_a_refused_start_and_its_row_ends() -> None:
    unplaced = DriverReplica("r", "p", failure="no node takes its pod", is_refused=True)
    refused = advance(row(S.STARTING, url=""), Facts(unplaced), SETTINGS, 1.0)
    assert (refused.row, refused.command, refused.failure) == (None, None, "no node takes its pod")
    unwanted = advance(row(S.STARTING, S.STOPPING, url=""), Facts(unplaced), SETTINGS, 1.0)
    assert unwanted.command is Command.STOP


@given(st.sampled_from(S), st.sampled_from(S), st.lists(FACTS, max_size=8))
def test_replica_with_streams_is_never_parked_and_a_row_ends_only_after_a_stop_or_a_refused_start(
    state: S, target: S, rounds: list[Facts]
) -> None:
    current = row(state, target)
    for number, facts in enumerate(rounds):
        found = advance(current, facts, SETTINGS, 10.0 * number)
        has_streams = facts.report is not None and facts.report.measured.load.num_open > 0
        if current.state in (S.ACTIVE, S.DRAINING) and has_streams:
            assert found.command is not Command.PARK
        if found.row is None:
            is_refused = current.state == S.STARTING and facts.is_refused
            assert is_refused or (current.state, facts.done) == (S.STOPPING, Command.STOP)
            return
        if found.row.state == S.ACTIVE and current.state == S.STARTING:
            assert facts.done is Command.PROBE
            assert not facts.failure
        current = found.row


def replace_listed(*, deadline_s: float) -> DriverReplica:
    return DriverReplica("r", "p", "http://127.0.0.1:1", deadline_s=deadline_s)
