"""The life of a replica as a pure function: from its row and what is seen of it, to its next row and a command.

    starting ─▶ standby ◀─▶ active ─▶ draining ─▶ standby, parking ─▶ parked ─▶ waking ─▶ standby
                                             └──▶ stopping ─▶ (no row)

A row names the state that its replica is in and the target that it is on its way to. The controller writes rows before
it acts on them, so that a successor goes on from the same place.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from msgspec.structs import replace

from penstock.api.replica_report import ReplicaReport
from penstock.fleet.drivers.driver import DriverReplica
from penstock.fleet.policy.observation import ReplicaState
from penstock.fleet.settings import PoolSettings
from penstock.tenancy.fleet import FleetReplica

SILENT_S = 60.0  # a replica whose process is there and that does not answer for so long is replaced
_SETTLE_S = 2.0  # gateways have heard of a drain by then
_OWN_DRAIN_S = 30.0  # how long a replica that was told to end still works, by default
_SERVING = (ReplicaState.STANDBY, ReplicaState.ACTIVE)
_LISTED_S = 30.0  # a driver that does not list a replica for so long after it was asked for has lost it


class Command(StrEnum):
    START = "start"
    PROBE = "probe"  # ask for a real token
    PARK = "park"
    WAKE = "wake"
    ROLE = "role"  # take the role of its pool
    STOP = "stop"


class Facts(NamedTuple):
    """Observation of one replica in one round."""

    listed: DriverReplica | None = None
    report: ReplicaReport | None = None
    heard_at: float = 0.0  # the last report's time
    done: Command | None = None  # a command that has ended since
    failure: str = ""  # of that command; empty: it did what it should
    is_refused: bool = False  # it was a start, and the driver has no capacity of this kind
    blind_s: float = 0.0  # how long ago the driver said what it has


class Next(NamedTuple):
    row: FleetReplica | None  # None: the replica is gone
    command: Command | None = None
    failure: str = ""  # why a replica that was wanted is not there


def advance(row: FleetReplica, facts: Facts, settings: PoolSettings, now: float) -> Next:
    """The next row, which may be the same, and the command to give. A command that runs is not given again by the
    controller."""
    if facts.listed is not None and facts.listed.url and not row.url:
        row = replace(row, url=facts.listed.url)
    if facts.listed is not None and facts.listed.deadline_s is not None and row.deadline is None:
        row = replace(row, deadline=now + facts.listed.deadline_s)
    state = ReplicaState(row.state)
    if facts.report is not None and facts.report.is_draining and state in _SERVING and row.deadline is None:
        row = replace(row, deadline=now + _OWN_DRAIN_S)  # somebody ends it, or its device has a fault
    if state is not ReplicaState.STOPPING and (failure := _lost(row, facts, settings, now)):
        return Next(_moved(replace(row, failure=failure), ReplicaState.STOPPING, now), Command.STOP, failure)
    match state:
        case ReplicaState.STARTING:
            return _starting(row, facts, now)
        case ReplicaState.STANDBY:
            return _standby(row, facts, now)
        case ReplicaState.ACTIVE:
            is_leaving = row.target != ReplicaState.ACTIVE
            return Next(_moved(row, ReplicaState.DRAINING, now) if is_leaving else row)
        case ReplicaState.DRAINING:
            return _draining(row, facts, settings, now)
        case ReplicaState.PARKING:
            return _ended(row, facts, Command.PARK, ReplicaState.PARKED, now)
        case ReplicaState.PARKED:
            if row.target in (ReplicaState.ACTIVE, ReplicaState.STANDBY):
                return Next(_moved(row, ReplicaState.WAKING, now), Command.WAKE)
            return _leaving(row, now) if row.target == ReplicaState.STOPPING else Next(row)
        case ReplicaState.WAKING:
            return _ended(row, facts, Command.WAKE, ReplicaState.STANDBY, now)
        case ReplicaState.STOPPING:
            if facts.done is Command.STOP and not facts.failure:
                return Next(None)
            return Next(replace(row, failure=facts.failure or row.failure), Command.STOP)


def _lost(row: FleetReplica, facts: Facts, settings: PoolSettings, now: float) -> str:
    """Returns why the replica cannot be used any more; empty: it can."""
    if facts.listed is not None and facts.listed.failure and not facts.listed.is_refused:
        return "it has ended, as was announced" if row.deadline is not None else facts.listed.failure
    if facts.done is Command.START and facts.failure and not facts.is_refused:
        return facts.failure
    if facts.listed is None and now - facts.blind_s - row.since > _LISTED_S:
        return "the driver no longer has it"
    if row.state == ReplicaState.STARTING:
        if now - row.created_at > settings.start_timeout_s:
            return f"it was not ready {settings.start_timeout_s:g} s after its start"
    elif now - max(facts.heard_at, row.since) > SILENT_S:
        return f"it has not answered for {SILENT_S:g} s"
    if facts.report is not None and facts.report.state in ("failed", "stopped"):
        return f"its engine has {facts.report.state}"
    return ""


def _starting(row: FleetReplica, facts: Facts, now: float) -> Next:
    if row.target == ReplicaState.STOPPING:
        return _leaving(row, now)
    if facts.is_refused:
        return Next(None, failure=facts.failure)
    if facts.listed is not None and facts.listed.is_refused:
        return Next(None, failure=facts.listed.failure)  # what is left of it belongs to nobody, and is stopped
    if facts.listed is None:
        return Next(row, Command.START if not facts.blind_s else None)
    if facts.report is None or facts.report.state != "ready":
        return Next(row)
    if facts.done is Command.PROBE and not facts.failure:
        row = replace(row, ready_at=now)
        is_active = row.target == ReplicaState.ACTIVE
        return Next(_moved(row, ReplicaState.ACTIVE if is_active else ReplicaState.STANDBY, now))
    return Next(row, Command.PROBE)


def _standby(row: FleetReplica, facts: Facts, now: float) -> Next:
    match row.target:
        case ReplicaState.ACTIVE:
            return Next(_moved(row, ReplicaState.ACTIVE, now))
        case ReplicaState.PARKED:
            if facts.report is None:
                return Next(row)
            if not facts.report.can_park:  # to try would cost the replica
                return Next(replace(row, target=ReplicaState.STANDBY))
            return Next(_moved(row, ReplicaState.PARKING, now), Command.PARK)
        case ReplicaState.STOPPING:
            return _leaving(row, now)
        case _:
            return Next(row)


def _draining(row: FleetReplica, facts: Facts, settings: PoolSettings, now: float) -> Next:
    if row.target == ReplicaState.ACTIVE:  # it is wanted again
        return Next(_moved(row, ReplicaState.ACTIVE, now))
    drained_s = now - row.since
    is_idle = facts.report is not None and facts.report.measured.load.num_open == 0 and drained_s >= _SETTLE_S
    must_go = row.deadline is not None and now >= row.deadline - _SETTLE_S
    if not is_idle and not must_go and drained_s < settings.drain_timeout_s:
        return Next(row)
    match row.target:
        case ReplicaState.STOPPING:
            return _leaving(row, now)
        case _:
            return Next(_moved(row, ReplicaState.STANDBY, now) if is_idle else row)


def _leaving(row: FleetReplica, now: float) -> Next:
    return Next(_moved(row, ReplicaState.STOPPING, now), Command.STOP)


def _ended(row: FleetReplica, facts: Facts, command: Command, then: ReplicaState, now: float) -> Next:
    """A change of state that one command makes. One that fails costs the replica: nobody knows what it holds."""
    if facts.done is not command:
        return Next(row, command)
    if facts.failure:
        return Next(
            _moved(replace(row, failure=facts.failure), ReplicaState.STOPPING, now), Command.STOP, facts.failure
        )
    return Next(_moved(row, then, now))


def _moved(row: FleetReplica, state: ReplicaState, now: float) -> FleetReplica:
    target = row.target
    if state is ReplicaState.STOPPING:
        target = ReplicaState.STOPPING
    return replace(row, state=state, since=now, target=target)
