"""Clocks that a test moves, for all that takes a `penstock.http.clock.TimerClock`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Any

_SHORT_S = 0.5
_SWEEP_EVERY = 256  # timers: those that were cancelled keep what they would have called


class ManualTimer:
    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._callback = callback
        self._args = args
        self.is_cancelled = False
        self.handle: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.handle is not None:
            self.handle.cancel()

    def fire(self) -> None:
        if not self.is_cancelled:
            self.cancel()
            self._callback(*self._args)


class ManualClock:
    """A clock that stands still. Belongs to one event loop: `advance` is called there, and so are the timers."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> ManualTimer:
        timer = ManualTimer(callback, args)
        if delay_s <= 0:
            asyncio.get_running_loop().call_soon(timer.fire)
        else:
            heapq.heappush(self._timers, (self.now_s + delay_s, number := next(self._order), timer))
            if number % _SWEEP_EVERY == 0:
                self._timers = [one for one in self._timers if not one[2].is_cancelled]
                heapq.heapify(self._timers)
        return timer

    @property
    def waits_s(self) -> list[float]:
        """Returns how far away the timers are that somebody waits for, the next one first."""
        return [round(due_s - self.now_s, 6) for due_s, _, timer in sorted(self._timers) if not timer.is_cancelled]

    def advance(self, seconds: float) -> None:
        """Calls every timer that becomes due, in order and at its own time, those that timers set meanwhile too. What
        tasks do then is theirs to do when the loop runs on."""
        until_s = self.now_s + seconds
        while self._timers and self._timers[0][0] <= until_s:
            self._fire_next()
        self.now_s = until_s

    def advance_to_next(self) -> bool:
        """Advances to the next timer, which is called. False: nobody waits for one."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return False
        self._fire_next()
        return True

    def _fire_next(self) -> None:
        due_s, _, timer = heapq.heappop(self._timers)
        self.now_s = max(self.now_s, due_s)
        timer.fire()


class SlowClock(ManualClock):
    """A clock for tests that are not about time, with real servers. It goes a hundred times slower, so that nobody on a
    busy machine is late, silent, stale or hung; but short timers, such as those of polls and retries, come as they
    would. `advance` moves it as it does any other. `slowness` is 1 where its times are compared with another process's.
    """

    def __init__(self, slowness: float = 100.0) -> None:
        super().__init__(time.monotonic())
        self._began_s = time.monotonic()
        self._slowness = slowness

    def now(self) -> float:
        return self.now_s + (time.monotonic() - self._began_s) / self._slowness

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> ManualTimer:
        timer = super().call_later(delay_s, callback, *args)
        if delay_s < _SHORT_S:
            timer.handle = asyncio.get_running_loop().call_later(delay_s, timer.fire)
        return timer
