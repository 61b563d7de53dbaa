"""Running totals that remember: what was added within the last five minutes, or within the last thirty days.

Totals are sampled at a few paces, often for what is recent and rarely for what is long ago, so that the memory is the
same after a minute and after a year. It knows no objective and no clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

Paces = Sequence[tuple[float, int]]  # seconds between samples, and how many are kept; the finest first

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MONTH: Paces = ((10.0, 62), (60.0, 362), (HOUR_S, 722))  # five minutes, six hours, thirty days
HOUR: Paces = ((10.0, 62), (60.0, 62))


class _Samples:
    __slots__ = ("every_s", "most", "next_at", "times", "totals")

    def __init__(self, every_s: float, most: int, now: float, totals: array[int]) -> None:
        self.every_s, self.most = every_s, most
        self.times, self.totals = [now], [totals]
        self.next_at = now + every_s

    def take(self, now: float, totals: array[int]) -> None:
        if now < self.next_at:
            return
        self.next_at = now + self.every_s
        self.times.append(now)
        self.totals.append(array("q", totals))
        if len(self.times) > self.most:
            del self.times[0], self.totals[0]


class History:
    def __init__(self, width: int, now: float, paces: Paces = MONTH) -> None:
        self.totals = array("q", bytes(8 * width))  # add to them; they never fall
        self.began_at = now
        self._paces = [_Samples(every_s, most, now, array("q", self.totals)) for every_s, most in paces]

    def tick(self, now: float) -> None:
        for pace in self._paces:
            pace.take(now, self.totals)

    def over(self, window_s: float, now: float) -> list[int]:
        """Returns what was added since then, or a little earlier; all of it if the window began before this did."""
        before = self._before(now - window_s)
        return [total - old for total, old in zip(self.totals, before, strict=True)]

    def _before(self, at: float) -> array[int]:
        for pace in self._paces:
            if pace.times[0] <= at:
                return pace.totals[bisect_right(pace.times, at) - 1]
        return self._paces[-1].totals[0]
