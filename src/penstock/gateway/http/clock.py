"""The gateway's clock: the time, and timers. One is shared by the listening side, the ways to the upstreams and all
that follows replicas, so that a test can hold the time still and move it (`tests/clocks.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from penstock.core.clock import Clock


class Timer(Protocol):
    def cancel(self) -> None: ...


class TimerClock(Clock, Protocol):
    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back once, in the event loop, unless it is cancelled before."""


class LoopClock:
    """The real one, on the event loop that runs where it is asked for a timer."""

    now = staticmethod(time.monotonic)  # not the loop's own: uvloop counts in milliseconds

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args)


LOOP_CLOCK = LoopClock()


async def sleep(clock: TimerClock, delay_s: float) -> None:
    woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = clock.call_later(delay_s, _wake, woken)
    try:
        await woken
    finally:
        timer.cancel()


@contextlib.asynccontextmanager
async def timeout(clock: TimerClock, delay_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` by this clock: raises TimeoutError where the block is left too late."""
    async with asyncio.timeout(None) as bound:
        timer = clock.call_later(delay_s, bound.reschedule, 0.0)  # long past: at once
        try:
            yield
        finally:
            timer.cancel()


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
