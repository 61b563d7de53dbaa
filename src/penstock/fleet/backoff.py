"""A wait after each failure that doubles until something succeeds: nothing that fails is tried in a hot loop."""

from __future__ import annotations

_FIRST_S = 2.0


class Backoff:
    def __init__(self, max_s: float = 300.0) -> None:
        self._max_s = max_s
        self.num_failures = 0  # in a row
        self.until = 0.0  # nothing is tried again before

    def fail(self, now: float) -> float:
        """Returns the seconds until the next try."""
        self.num_failures += 1
        wait_s = min(_FIRST_S * 2.0 ** (self.num_failures - 1), self._max_s)
        self.until = now + wait_s
        return wait_s
