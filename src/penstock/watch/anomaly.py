"""Is a signal far from its own past? Medians, and deviations from them, so that a fault does not become its own norm.

A signal is compared, as a logarithm, with what it was at this time of the week; what then differs from the last day's
median by more than chance and habit explain, for a while, is an anomaly. What follows the load says nothing before it
has been seen for a week; the others are compared with the last day. Nothing is learnt while something is wrong.
"""

from __future__ import annotations

from collections import deque
from math import exp, floor, log, sqrt
from statistics import median
from typing import NamedTuple

from penstock.watch.samples import Reading, Signal

SLOT_S = 1800.0
_WEEK, _DAY = 336, 48  # slots
_WEEKS = 4  # that a season is the median of
_MIN_SLOTS = 4  # of the past, before anything can be said
_SMOOTH = 5  # readings
_IN_A_ROW = 3
_FAR, _NEAR = 5.0, 2.5  # deviations: to begin, and to end
_MAD = 1.4826  # makes a median of absolute deviations comparable with a standard deviation
_LONGEST_S = 86400.0  # what has been so for a day is how it is
_LEAST = 0.01  # logarithms need something


class Character(NamedTuple):
    """A signal's character: the bad way (-1 down, 1 up, 0 both), what is worth saying, how much one request varies."""

    bad: int
    least_effect: float  # a ratio
    noise: float  # of the logarithm, for one request
    follows_load: bool = False


CHARACTERS = {
    Signal.TOKENS: Character(0, 1.8, 1.5, follows_load=True),
    Signal.SPEED: Character(-1, 1.25, 0.3),
    Signal.TTFT: Character(1, 1.6, 1.0),
    Signal.ANSWER: Character(0, 1.5, 1.2),
    Signal.HIT_RATE: Character(-1, 1.4, 1.2),
    Signal.ACCEPTANCE: Character(-1, 1.2, 0.5),
}
_FLOOR = 0.03  # the least deviation to reckon with


class Baseline:
    """One signal of one replica or model. `effect` is how many times as much as expected it was last."""

    def __init__(self, signal: Signal) -> None:
        self._character = CHARACTERS[signal]
        self._season: dict[int, deque[float]] = {}  # by slot of the week
        self._slot: int | None = None
        self._in_slot: list[float] = []
        self._away: list[float] = []  # by how much they were not as expected, where something was expected
        self._past: deque[float] = deque(maxlen=_DAY)  # of slots: by how much they were not as expected
        self._level = self._deviation = 0.0
        self._last: deque[tuple[float, int]] = deque(maxlen=_SMOOTH)
        self._row = 0
        self._since: float | None = None
        self.effect = 1.0

    @property
    def is_anomalous(self) -> bool:
        return self._since is not None

    def feed(self, reading: Reading, at_s: float) -> None:
        """One reading; `at_s` is Unix time: seasons are the calendar's."""
        slot = floor(at_s / SLOT_S)
        if slot != self._slot:
            self._close_slot()
            self._slot = slot
        value = log(max(reading.value, _LEAST))
        self._last.append((value, reading.requests))
        expected = self._expected(at_s)
        if expected is not None:
            self._judge(expected, at_s)
        if self._since is None:
            self._in_slot.append(value)
            if expected is not None:
                self._away.append(value - expected)
        elif at_s - self._since > _LONGEST_S:
            self._begin_again()

    # -- inside

    def _expected(self, at_s: float) -> float | None:
        """The season's value, between the middles of two slots; 0: it does not follow the load; None: not known yet."""
        if not self._character.follows_load:
            return 0.0
        place = at_s / SLOT_S - 0.5
        first = floor(place)
        before, after = self._season.get(first % _WEEK), self._season.get((first + 1) % _WEEK)
        if before is None or after is None:
            return None
        return median(before) + (place - first) * (median(after) - median(before))

    def _judge(self, expected: float, at_s: float) -> None:
        if len(self._past) < _MIN_SLOTS or len(self._last) < _SMOOTH:
            return
        value = median([value for value, _ in self._last])
        count = sum(count for _, count in self._last)
        chance = self._character.noise / sqrt(count) if count else self._character.noise
        away = value - expected - self._level
        deviations = away / sqrt(self._deviation**2 + chance**2)
        self.effect = exp(away)
        bad, least = self._character.bad, log(self._character.least_effect)
        if self._since is None:
            is_bad = abs(deviations) >= _FAR and abs(away) >= least and away * bad >= 0
            self._row = self._row + 1 if is_bad else 0
            if self._row >= _IN_A_ROW:
                self._since, self._row = at_s, 0
                self._clear_slot()  # it may have been wrong already
        else:
            is_well = abs(deviations) < _NEAR or abs(away) < least / 2 or away * bad < 0
            self._row = self._row + 1 if is_well else 0
            if self._row >= _IN_A_ROW:
                self._since, self._row = None, 0

    def _close_slot(self) -> None:
        if len(self._in_slot) >= _SMOOTH and self._slot is not None and self._character.follows_load:
            self._season.setdefault(self._slot % _WEEK, deque(maxlen=_WEEKS)).append(median(self._in_slot))
        if len(self._away) >= _SMOOTH:
            self._past.append(median(self._away))
            self._level = median(self._past)
            self._deviation = max(_FLOOR, _MAD * median([abs(one - self._level) for one in self._past]))
        self._clear_slot()

    def _clear_slot(self) -> None:
        self._in_slot.clear()
        self._away.clear()

    def _begin_again(self) -> None:
        self._since, self._row = None, 0
        self._past.clear()
        self._clear_slot()
