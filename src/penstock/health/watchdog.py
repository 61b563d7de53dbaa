"""Finds the replica that answers and makes no tokens: its device hangs, its process does not know.

It has something to do and its step counter stands still, for longer than any of its steps may take.
"""

from __future__ import annotations

_MANY_STEPS = 4.0  # of the longest kind: a replica on a slow machine is slow, not hung
_UNMEASURED = 6.0  # times as long, before its first steps: they may compile kernels


class Watchdog:
    def __init__(self, hung_after_s: float) -> None:
        self._hung_after_s = hung_after_s
        self._steps: int | None = None
        self._well_at: float | None = None  # the last time that it had nothing to do, or had done something

    def start_over(self) -> None:
        self._well_at = None

    def stalled(self, *, sequences: int, steps: int, step_s: float | None, now: float) -> float:
        """Returns by a report how much of the longest time it may stand still is over; from 1 on it hangs.

        `step_s`: what its longest step should take; None: nobody knows yet.
        """
        if sequences == 0 or steps != self._steps or self._well_at is None:
            self._well_at = now
        self._steps = steps
        return (now - self._well_at) / self._patience_s(step_s)

    def _patience_s(self, step_s: float | None) -> float:
        if step_s is None:
            return _UNMEASURED * self._hung_after_s
        return max(self._hung_after_s, _MANY_STEPS * step_s)
