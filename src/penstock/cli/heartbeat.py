"""Heartbeats of a worker to its supervisor: a byte over a pipe each second, from the worker's event loop.

A worker whose event loop is blocked, or whose process is stopped, sends none. One that has closed its end is about to
end by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from io import FileIO

from penstock.http import clock as clocks
from penstock.http.clock import LOOP_CLOCK, TimerClock

BEAT_S = 1.0
_MANY = 1 << 12  # more than can have come since the last look


def heartbeat_pipe() -> tuple[FileIO, FileIO]:
    """The end of the supervisor, and the worker's."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return FileIO(reading, "r"), FileIO(writing, "w")


@contextlib.asynccontextmanager
async def heartbeats_sent(pipe: FileIO, clock: TimerClock = LOOP_CLOCK) -> AsyncIterator[None]:
    """Heartbeats go out while the context is open; its end closes the pipe."""
    with pipe:
        sending = asyncio.create_task(_send(pipe, clock))
        try:
            yield
        finally:
            sending.cancel()


async def _send(pipe: FileIO, clock: TimerClock) -> None:
    with contextlib.suppress(BrokenPipeError):  # the supervisor is gone
        while True:
            pipe.write(b".")  # to no effect while the pipe is full: the supervisor is stopped
            await clocks.sleep(clock, BEAT_S)


async def is_silent(pipe: FileIO, timeout_s: float, clock: TimerClock = LOOP_CLOCK) -> bool:
    """Waits until no heartbeat has come for `timeout_s`, or until the worker has closed its end: False.

    The silence is counted in looks of this process. So a machine that stood still as a whole, a suspended one say,
    makes no worker silent."""
    silent_s = 0.0
    while silent_s < timeout_s:
        await clocks.sleep(clock, BEAT_S)
        beats = pipe.read(_MANY)
        if beats == b"":
            return False
        silent_s = 0.0 if beats else silent_s + BEAT_S
    return True
