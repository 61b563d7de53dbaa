"""Silence of somebody who should speak, told once it has lasted too long, as far as this process has listened.

A process that stood still has heard nobody, and after that its timers may run before its sockets are read. So a look
that comes late blames nobody: the time begins again.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.http.clock import Timer, TimerClock

_LOOKS = 4  # in the time that somebody may be silent


class SilenceTimer:
    def __init__(self, clock: TimerClock, after_s: float, is_silent: Callable[[], None]) -> None:
        """`is_silent` is called once after each `begin`, unless that is stopped before."""
        self._clock = clock
        self._after_s = after_s
        self._every_s = after_s / _LOOKS
        self._is_silent = is_silent
        self._timer: Timer | None = None
        self._look_at = 0.0
        self._was_deaf = False
        self.heard_at = 0.0

    def begin(self) -> None:
        self.stop()
        self.heard_at = self._clock.now()
        self._look_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def heard(self) -> bool:
        """Something was said. False: before that, this process did not listen for a while."""
        self.heard_at = now = self._clock.now()
        was_deaf, self._was_deaf = self._was_deaf or self._is_late(now), False
        return not was_deaf

    def _look(self) -> None:
        now = self._clock.now()
        if self._is_late(now):
            self.heard_at, self._was_deaf = now, True
        elif now - self.heard_at > self._after_s:
            self._timer = None
            self._is_silent()
            return
        self._look_later()

    def _look_later(self) -> None:
        self._look_at = self._clock.now() + self._every_s
        self._timer = self._clock.call_later(self._every_s, self._look)

    def _is_late(self, now: float) -> bool:
        return self._timer is not None and now - self._look_at > self._every_s
