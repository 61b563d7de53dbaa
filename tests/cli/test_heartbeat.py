"""Heartbeats over a real pipe, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from io import FileIO

from penstock.cli.heartbeat import BEAT_S, heartbeat_pipe, heartbeats_sent, is_silent
from tests.clocks import ManualClock
from tests.waiting import eventually_async

TIMEOUT_S = 3 * BEAT_S


class Watched:
    """A supervisor's end of the pipe, looked at by a clock of its own."""

    def __init__(self, pipe: FileIO) -> None:
        self.clock = ManualClock()
        self._found = asyncio.create_task(is_silent(pipe, TIMEOUT_S, self.clock))

    async def look(self) -> bool | None:
        """After the next look: whether the worker is found silent; None: not yet found one or the other."""
        await eventually_async(lambda: self.clock.waits_s)
        self.clock.advance_to_next()
        await eventually_async(lambda: self.clock.waits_s or self._found.done())
        return self._found.result() if self._found.done() else None


async def test_worker_is_silent_after_looks_that_find_no_heartbeat() -> None:
    reading, writing = heartbeat_pipe()
    with reading, writing:
        watched = Watched(reading)
        assert [await watched.look() for _ in range(3)] == [None, None, True]


async def test_any_heartbeat_begins_the_time_again() -> None:
    reading, writing = heartbeat_pipe()
    with reading, writing:
        watched = Watched(reading)
        assert [await watched.look() for _ in range(2)] == [None, None]
        writing.write(b".")
        assert [await watched.look() for _ in range(4)] == [None, None, None, True]


async def test_time_in_which_the_supervisor_did_not_look_is_no_silence() -> None:
    """As after a suspended machine, whose workers stood still too: its timers come late, and each once."""
    reading, writing = heartbeat_pipe()
    with reading, writing:
        watched = Watched(reading)
        await eventually_async(lambda: watched.clock.waits_s)
        watched.clock.now_s += 3600
        assert await watched.look() is None
        writing.write(b".")
        assert await watched.look() is None


async def test_worker_beats_from_its_event_loop_and_one_that_ends_is_not_silent() -> None:
    reading, writing = heartbeat_pipe()
    clock = ManualClock()
    with reading:
        watched = Watched(reading)
        async with heartbeats_sent(writing, clock):
            for _ in range(5):
                await eventually_async(lambda: clock.waits_s)
                assert await watched.look() is None
                clock.advance(BEAT_S)
        while (is_found_silent := await watched.look()) is None:  # what was sent before is read first
            pass
        assert is_found_silent is False


async def test_worker_goes_on_when_its_supervisor_is_stopped_and_when_it_is_gone() -> None:
    reading, writing = heartbeat_pipe()
    clock = ManualClock()
    while writing.write(bytes(4096)):  # until the pipe is full: nobody reads
        pass
    async with heartbeats_sent(writing, clock):
        await eventually_async(lambda: clock.waits_s)
        reading.close()
        clock.advance(BEAT_S)
        await eventually_async(lambda: asyncio.all_tasks() == {asyncio.current_task()})
