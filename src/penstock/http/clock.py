"""The gateway's clock: the time, and timers. One is shared by the listening side, the ways to the upstreams and all
that follows replicas, so that a test can hold the time still and move it (`tests/clocks.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from penstock.core.clock import Clock

_LATE_S = 0.25  # no callback should hold up the others for so long


class Timer(Protocol):
    def cancel(self) -> None: ...


class TimerClock(Clock, Protocol):
    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        """Calls back once, in the event loop, unless it is cancelled before."""


class LoopClock:
    """The real one, on the event loop that runs where it is asked for a timer."""

    now = staticmethod(time.monotonic)  # not the loop's own: uvloop counts in milliseconds

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Timer:
        return _LoopTimer(self.now, delay_s, callback, args)


class _LoopTimer:
    """A timer that comes late, since its loop stood still, waits once more: for as long as it is late, but no longer
    than before. Nobody's bytes were read meanwhile: whoever seems to have taken too long may have answered long ago."""

    __slots__ = ("_args", "_callback", "_delay_s", "_due_s", "_handle", "_loop", "_now", "_was_late")

    def __init__(
        self, now: Callable[[], float], delay_s: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._now = now
        self._delay_s = delay_s
        self._due_s = now() + delay_s
        self._callback = callback
        self._args = args
        self._was_late = False
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(delay_s, self._fire)

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        late_s = self._now() - self._due_s
        if late_s > _LATE_S and not self._was_late:
            self._was_late = True
            self._handle = self._loop.call_later(min(late_s, self._delay_s), self._fire)
        else:
            self._callback(*self._args)


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
