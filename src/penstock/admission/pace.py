"""The measured pace of a line: what left it over how long there was one, the recent counting most."""

from __future__ import annotations

import math

_MEMORY_S = 15.0
_GUESS_S = 2.0  # how much observation a first guess is worth
_FORGET_S = 60.0


class Pace:
    """The pace in the time in which something waited: an empty line says nothing about how fast it could move."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._seen_at = -math.inf

    def begin(self, now: float, guess: float) -> None:
        """A line forms. What was learned long ago counts no more than the guess."""
        if now - self._seen_at > _FORGET_S:
            self._cost, self._seconds = guess * _GUESS_S, _GUESS_S
        self._seen_at = now

    def left(self, cost: float, now: float) -> None:
        """Something left the line."""
        self._pass(now)
        self._cost += cost

    def rate(self, now: float) -> float:
        """Cost per second; never zero, so that a stuck line has a long wait and not an infinite one."""
        self._pass(now)
        return max(self._cost, 1e-3) / max(self._seconds, 1e-3)

    def _pass(self, now: float) -> None:
        elapsed_s = now - self._seen_at
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._cost *= kept
            self._seconds = self._seconds * kept + _MEMORY_S * (1.0 - kept)
            self._seen_at = now
