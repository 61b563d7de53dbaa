"""Finds the replica that answers /health and makes no tokens: its device hangs, its process does not know.

It has something to do, its step counter stands still and no stream of ours got a token, for longer than any step may
take. Once found it stays out until a deep probe, a real token, says that it is back.
"""

from __future__ import annotations

HUNG_AFTER_S = 10.0


class Watchdog:
    def __init__(self, hung_after_s: float = HUNG_AFTER_S) -> None:
        self._hung_after_s = hung_after_s
        self._steps: int | None = None
        self._idle_or_moving_at: float | None = None  # the last time that nothing was wrong
        self._is_hung = False

    @property
    def is_hung(self) -> bool:
        return self._is_hung

    def saw_token(self, now: float) -> None:
        """A stream of ours got one."""
        self._idle_or_moving_at = now

    def observe(self, sequences: int, steps: int, now: float) -> bool:
        """What the replica reports, or what we know it to have when it reports nothing. Is it hung?"""
        if sequences == 0 or steps != self._steps or self._idle_or_moving_at is None:
            self._idle_or_moving_at = now
        self._steps = steps
        if now - self._idle_or_moving_at >= self._hung_after_s:
            self._is_hung = True
        return self._is_hung

    def deep_probe_passed(self, now: float) -> None:
        self._is_hung = False
        self._idle_or_moving_at = now
