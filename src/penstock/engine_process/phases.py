"""Durations of a start's phases: seconds on the clock, and of processor time of the process and its threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.clock import Clock, MonotonicClock

Tell = Callable[[str, int, int], None]


class Phases:
    """Called with each phase as it begins or moves on, it tells the next in line and keeps the time."""

    def __init__(
        self,
        first: str,
        tell: Tell = lambda name, done, total: None,
        clock: Clock | None = None,
        *,
        began_s: float | None = None,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        """`began_s`: on the clock, where the first phase began before it was known; its processor time is the
        process's so far."""
        self._tell = tell
        self._clock = clock or MonotonicClock()
        self._cpu_s = cpu_s
        self._name = first
        self._since_s = self.began_s = self._clock.now() if began_s is None else began_s
        self._since_cpu_s = self.began_cpu_s = cpu_s() if began_s is None else 0.0
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}
        tell(first, 0, 0)

    def __call__(self, name: str, done: int = 0, total: int = 0) -> None:
        if name != self._name:
            self.close()
            self._name = name
        self._tell(name, done, total)

    def close(self) -> None:
        now_s, now_cpu_s = self._clock.now(), self._cpu_s()
        self.seconds[self._name] = round(now_s - self._since_s, 3)
        self.cpu_seconds[self._name] = round(now_cpu_s - self._since_cpu_s, 3)
        self._since_s, self._since_cpu_s = now_s, now_cpu_s

    def resume(self, name: str) -> None:
        """A phase begins now; the time since the last one was closed is another process's. Processor time that was
        used meanwhile is this phase's."""
        self._name, self._since_s = name, self._clock.now()


def process_began_s() -> float:
    """The start of this process on the clock of `MonotonicClock`, to a hundredth of a second; now, where the system
    does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age_s = 0.0
    return time.monotonic() - age_s
