"""How long each part of start-up took."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.clock import Clock, MonotonicClock


class Phases:
    """Called with each phase as it begins or moves on, it tells the next in line and keeps the time."""

    def __init__(self, first: str, tell: Callable[[str, int, int], None], clock: Clock | None = None) -> None:
        self._tell = tell
        self._clock = clock or MonotonicClock()
        self._name = first
        self._since_s = self._clock.now()
        self.seconds: dict[str, float] = {}
        tell(first, 0, 0)

    def __call__(self, name: str, done: int, total: int) -> None:
        if name != self._name:
            self.close()
            self._name = name
        self._tell(name, done, total)

    def close(self) -> None:
        now_s = self._clock.now()
        self.seconds[self._name] = round(now_s - self._since_s, 3)
        self._since_s = now_s
