"""Time as an argument: the shells own a clock, the policies are only ever told `now`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds that never run backwards; only differences mean anything."""


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()
