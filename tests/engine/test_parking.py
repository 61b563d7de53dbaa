"""Parking and waking: an engine that gives its device's memory back, with a real process and without."""

from __future__ import annotations

import asyncio
import signal

import pytest

from penstock.core.errors import Conflict, EngineFailed, EngineUnavailable, UnsupportedTask
from penstock.core.request import FinishReason, Request
from penstock.engine.client import EngineClient, EngineState
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner
from penstock.engine.messages import Abort, Embed, Embedded, FromEngine, Park, ParkAnswer, StepReport, Submit, Wake
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from tests.engine.expecting import engine, engine_process, expected, is_ready, tokens_of
from tests.waiting import GIVE_UP_S, eventually_async

PROMPT = list(range(40))


# -- one engine, step by step


def make(*, overlaps: bool = False, host_blocks: int = 0, can_park: bool = True) -> Engine:
    cache = KVCache(64, 4, routing_tokens=16, host_blocks=host_blocks)
    scheduler = Scheduler(cache, StepBudget(64, target_s=None, floor=4), max_num_seqs=4)
    runner = FakeRunner(64, 4, overlaps=overlaps, host_blocks=host_blocks)
    return Engine(scheduler, runner, memory=runner if can_park else None)


def step(made: Engine) -> None:
    if made.may_launch:
        made.launch(0.0)
    if made.in_flight:
        result = made.result()
        assert result is not None
        made.commit(result, 0.0)


def taken(made: Engine) -> list[FromEngine]:
    outbox, made.outbox = made.outbox, []
    return outbox


def tokens(made: Engine, request: Request) -> list[int]:
    made.receive([Submit(request)], 0.0)
    while not made.is_idle:
        step(made)
    reports = [message for message in taken(made) if isinstance(message, StepReport)]
    return [token for report in reports for event in report.events for token in event.token_ids]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_park_waits_for_what_runs_and_a_parked_engine_takes_nothing(overlaps: bool) -> None:
    made = make(overlaps=overlaps)
    made.receive([Submit(Request("a", PROMPT, max_tokens=3))], 0.0)
    step(made)
    made.receive([Park()], 0.0)
    assert made.wants_park
    assert not made.is_parked
    made.receive([Submit(Request("late", [1], max_tokens=1)), Embed("text", [[1]])], 0.0)
    while not made.is_idle:
        step(made)
    before = taken(made)
    events = [event for message in before if isinstance(message, StepReport) for event in message.events]
    assert [token for event in events if event.request_id == "a" for token in event.token_ids] == expected(PROMPT, 3)
    (late,) = [event for event in events if event.request_id == "late"]
    assert (late.finish, late.error_code) == (FinishReason.ERROR, EngineUnavailable.code)
    assert [message.error for message in before if isinstance(message, Embedded)] == ["the engine is parked"]
    assert not any(isinstance(message, ParkAnswer) for message in before)
    made.receive([], 0.0)
    report, answer = taken(made)
    assert made.is_parked
    assert isinstance(answer, ParkAnswer)
    assert (answer.is_parked, answer.code, answer.change.num_bytes) == (True, "", 256)
    assert isinstance(report, StepReport)
    assert report.measured.cache.cached_blocks == 0


def test_the_prefix_cache_is_empty_after_a_park_and_says_so() -> None:
    made = make()
    first = tokens(made, Request("a", PROMPT, max_tokens=2))
    held = made.scheduler.cache.pool.num_cached
    assert held
    made.receive([Park()], 0.0)
    report = taken(made)[0]
    assert isinstance(report, StepReport)
    assert report.cache is not None
    assert len(report.cache.removed) == len(PROMPT) // 16
    made.receive([Wake()], 0.0)
    taken(made)
    assert tokens(made, Request("b", PROMPT, max_tokens=2)) == first
    assert made.scheduler.counters.cached_tokens == 0
    assert made.scheduler.cache.pool.num_cached == held


def test_blocks_in_host_memory_outlive_a_park() -> None:
    made = make(host_blocks=64)
    first = tokens(made, Request("a", PROMPT, max_tokens=2))
    for number in range(8):  # until the device has handed out the first prompt's blocks
        tokens(made, Request(f"other {number}", [100 + number] * 40, max_tokens=1))
    taken(made)
    made.receive([Park(), Wake()], 0.0)
    made.receive([Park()], 0.0)
    made.receive([Wake()], 0.0)
    taken(made)
    assert tokens(made, Request("b", PROMPT, max_tokens=2)) == first
    assert made.scheduler.cache.loaded_tokens > 0


def test_an_abort_of_the_last_sequence_lets_the_park_go_on() -> None:
    made = make()
    made.receive([Submit(Request("a", PROMPT, max_tokens=90))], 0.0)
    step(made)
    made.receive([Park()], 0.0)
    made.receive([Abort("a")], 0.0)
    assert made.is_parked


def test_an_engine_whose_memory_cannot_be_given_back_says_so() -> None:
    made = make(can_park=False)
    made.receive([Park()], 0.0)
    (answer,) = taken(made)
    assert isinstance(answer, ParkAnswer)
    assert (answer.is_parked, answer.code) == (False, UnsupportedTask.code)
    assert tokens(made, Request("a", PROMPT, max_tokens=2)) == expected(PROMPT, 2)


# -- a real process


async def test_a_process_is_parked_and_woken_and_answers_as_before() -> None:
    async with engine(routing_tokens=16) as client:
        assert await tokens_of(client, Request("a", PROMPT, max_tokens=3)) == expected(PROMPT, 3)
        await eventually_async(lambda: len(client.cache.hashes), lambda number: number == 2)
        change = await asyncio.wait_for(client.park(), GIVE_UP_S)
        assert change.num_bytes == 2048
        assert client.state is EngineState.PARKED
        assert client.cache.hashes == {}
        with pytest.raises(EngineUnavailable, match="parked"):
            client.open([Request("b", [1], max_tokens=1)])
        with pytest.raises(Conflict, match="parked"):
            await client.park()
        await asyncio.wait_for(client.wake(), GIVE_UP_S)
        assert is_ready(client)
        assert await tokens_of(client, Request("c", PROMPT, max_tokens=3)) == expected(PROMPT, 3)
        with pytest.raises(Conflict, match="ready"):
            await client.wake()
        assert client.restarts == 0


async def test_an_engine_that_finds_no_memory_stays_parked() -> None:
    async with engine(wake_fails=1) as client:
        await asyncio.wait_for(client.park(), GIVE_UP_S)
        with pytest.raises(EngineUnavailable, match="no room"):
            await asyncio.wait_for(client.wake(), GIVE_UP_S)
        assert client.state is EngineState.PARKED
        await asyncio.wait_for(client.wake(), GIVE_UP_S)
        assert await tokens_of(client, Request("a", [1], max_tokens=2)) == expected([1], 2)


async def test_a_process_that_dies_while_it_is_parked_or_parking_is_started_again() -> None:
    async with engine(step_s=0.01) as client:
        await asyncio.wait_for(client.park(), GIVE_UP_S)
        await _killed(client)
        with client.open([Request("a", [1], max_tokens=1000)]):
            parking = asyncio.create_task(client.park())
            await eventually_async(lambda: client.state, lambda state: state is EngineState.PARKING)
            await _killed(client)
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(parking, GIVE_UP_S)
        assert await tokens_of(client, Request("b", [1], max_tokens=2)) == expected([1], 2)


async def _killed(client: EngineClient) -> None:
    restarts = client.restarts
    engine_process(client).send_signal(signal.SIGKILL)
    await eventually_async(lambda: (client.restarts > restarts, is_ready(client)), all)
