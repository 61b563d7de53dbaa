"""A process that stood still has heard nobody, and blames nobody for that."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineSpeeds
from penstock.gateway.replicas.silence import SilenceTimer
from penstock.health.replica_health import ReplicaHealth
from penstock.http import clock as clocks
from penstock.http.clock import LoopClock
from tests.clocks import ManualClock
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, Replica

FAR_S = 3600.0


class StallingClock(LoopClock):
    """The real one, for a process that may seem to have stood still: the time jumps, timers come late by it, and no
    socket was read meanwhile."""

    def __init__(self) -> None:
        self.stood_still_s = 0.0

    def now(self) -> float:  # type: ignore[override]
        return LoopClock.now() + self.stood_still_s


class LateClock(ManualClock):
    """All timers that are due at the end of a jump come then, late."""

    def jump(self, seconds: float) -> None:
        late = [timer for due_s, _, timer in self._timers if due_s <= self.now_s + seconds]
        self._timers = [one for one in self._timers if one[2] not in late]
        self.now_s += seconds
        for timer in late:
            timer.fire()


def silent_after(clock: ManualClock) -> tuple[SilenceTimer, list[float]]:
    told: list[float] = []
    silence = SilenceTimer(clock, 4.0, lambda: told.append(clock.now()))
    silence.begin()
    return silence, told


def test_who_is_silent_for_too_long_is_told_of_once() -> None:
    clock = ManualClock(0.0)
    silence, told = silent_after(clock)
    clock.advance(3.0)
    assert silence.heard()
    clock.advance(100.0)
    assert told == [8.0]  # the first look after more than four seconds


def test_a_look_that_comes_late_blames_nobody_and_begins_anew() -> None:
    clock = LateClock(0.0)
    _, told = silent_after(clock)
    clock.jump(FAR_S)
    assert told == []
    clock.advance(4.0)
    assert told == []
    clock.advance(1.0)
    assert told == [FAR_S + 5.0]  # one that is really gone is found out after all


def test_whoever_is_heard_before_the_late_look_is_told_that_nobody_listened() -> None:
    clock = ManualClock(0.0)
    silence, _ = silent_after(clock)
    clock.now_s += FAR_S  # its timers have not come yet
    assert not silence.heard()


def test_whoever_is_heard_after_the_late_look_is_told_so_too() -> None:
    clock = LateClock(0.0)
    silence, _ = silent_after(clock)
    clock.jump(FAR_S)
    assert [silence.heard(), silence.heard()] == [False, True]


def test_time_in_which_nobody_listened_is_no_time_without_steps() -> None:
    health = ReplicaHealth()
    report = EngineMeasurements(EngineLoad(steps=7, num_running=1), speeds=EngineSpeeds(1000.0))
    assert not health.hangs(report, 0.0)
    health.start_over()
    assert not health.hangs(report, FAR_S)
    assert health.hangs(report, FAR_S + 10.0)


async def test_a_timeout_that_comes_late_waits_once_more_and_not_for_ever() -> None:
    clock = StallingClock()
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stand_still() -> None:
        clock.stood_still_s += FAR_S
        asyncio.get_running_loop().call_soon(done.set_result, "an answer that had come long ago")

    async with clocks.timeout(clock, 0.01):
        stand_still()
        await done


async def test_a_timeout_waits_only_once_more() -> None:
    clock = StallingClock()

    async def never() -> None:
        async with clocks.timeout(clock, 0.01):
            clock.stood_still_s += FAR_S
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await never()


class InFlightRequest:
    is_stream = True
    num_lost = 0

    def id_to_move(self) -> None:
        return None

    def replica_lost(self) -> None:
        self.num_lost += 1


def test_a_gateway_that_stood_still_calls_no_replica_lost(replica_at_hand: Replica) -> None:
    clock, request = LateClock(), InFlightRequest()
    with running_gateway(replica_at_hand, clock=clock) as gateway:
        (followed,) = gateway.app.replicas.values()

        def stand_still() -> tuple[int, str]:
            """Its timers come before its sockets are read."""
            followed.in_flight.add(request)
            clock.jump(10.0)
            followed.in_flight.discard(request)
            return request.num_lost, str(followed.snapshot.state)

        assert gateway.call(stand_still) == (0, "ready")
        assert gateway.openai.completions.create(model=NAME, prompt="the fox", max_tokens=3).choices
