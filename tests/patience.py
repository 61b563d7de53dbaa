"""How long tests wait. A busy machine leaves a process standing for as long as it likes, and that is nobody's fault: so
many seconds are so many looks, each of which costs a moment at most."""

from __future__ import annotations

import time
from collections.abc import Callable

MOMENT_S = 0.02


class Patience:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looked_s = time.monotonic()
        self.spent_s = 0.0

    def look(self) -> None:
        """Before each pause; fails when there is no more."""
        now_s = time.monotonic()
        self.spent_s += min(now_s - self._looked_s, MOMENT_S)
        self._looked_s = now_s
        assert self.spent_s < self._seconds, "it never happened"


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """How long it took."""
    patience = Patience(within_s)
    while not condition():
        patience.look()
        time.sleep(0.002)
    return patience.spent_s
