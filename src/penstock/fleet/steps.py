"""Steps of a pool's size up and down, and those that were taken back soon after: the sign of a policy that flaps."""

from __future__ import annotations

from collections import deque

TAKEN_BACK_S = 300.0
_KEPT_S = 3600.0


class StepRecord:
    def __init__(self) -> None:
        self._wanted: int | None = None
        self._up_at = self._down_at = float("-inf")
        self._reversals: deque[float] = deque()

    def observe(self, wanted: int, now: float) -> None:
        before, self._wanted = self._wanted, wanted
        if before is not None and wanted > before:
            self._note(now, self._down_at)
            self._up_at, self._down_at = now, float("-inf")
        elif before is not None and wanted < before:
            self._note(now, self._up_at)
            self._down_at, self._up_at = now, float("-inf")
        while self._reversals and now - self._reversals[0] > _KEPT_S:
            self._reversals.popleft()

    @property
    def num_reversals(self) -> int:
        """Those of the last hour."""
        return len(self._reversals)

    def _note(self, now: float, opposite_at: float) -> None:
        if now - opposite_at <= TAKEN_BACK_S:
            self._reversals.append(now)
