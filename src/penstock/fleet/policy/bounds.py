"""Bounds of a pool's size at a time: its settings, and schedules for some hours of the week."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.core.errors import ConfigError
from penstock.fleet.settings import PoolSettings, Schedule

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class Bounds(NamedTuple):
    min: int
    max: int
    min_name: str = "min"  # what decides if it does: min, schedule or rollout
    max_name: str = "max"

    def raised(self, floor: int) -> Bounds:
        """Returns bounds of at least as many replicas as a rollout needs; `max` stands above it."""
        if floor <= self.min:
            return self
        return self._replace(min=min(floor, self.max), min_name="rollout")


class ScheduledBounds:
    """Bounds change at whole minutes, and are reckoned once for each."""

    def __init__(self, settings: PoolSettings) -> None:
        self._always = Bounds(settings.min, settings.max)
        try:
            self._zone = ZoneInfo(settings.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            raise ConfigError(f"no time zone '{settings.timezone}'", param="timezone") from None
        self._spans = [_Span(each) for each in settings.schedules]
        self._minute, self._bounds = -1, self._always

    def at(self, now: float) -> Bounds:
        """Bounds in force: where schedules overlap, the largest `min` and the smallest `max` count.
        `max` in the settings stands above all."""
        if not self._spans:
            return self._always
        minute = int(now // 60)
        if minute != self._minute:
            local = datetime.fromtimestamp(now, UTC).astimezone(self._zone)
            self._minute, self._bounds = minute, self._reckon(local.weekday(), local.hour * 60 + local.minute)
        return self._bounds

    def _reckon(self, weekday: int, minute: int) -> Bounds:
        held = [span.schedule for span in self._spans if span.holds(weekday, minute)]
        low = max((each.min for each in held if each.min is not None), default=None)
        high = min((each.max for each in held if each.max is not None), default=None)
        bounds = self._always
        if high is not None and high < bounds.max:
            bounds = bounds._replace(max=high, max_name="schedule")
        if low is not None:
            bounds = bounds._replace(min=low, min_name="schedule")
        return bounds._replace(min=min(bounds.min, bounds.max))


class _Span:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._days = {_DAYS.index(day) for day in schedule.days} or set(range(7))
        self._start, self._end = _minutes(schedule.start), _minutes(schedule.end)

    def holds(self, weekday: int, minute: int) -> bool:
        """Hours past midnight belong to the day on which they began."""
        if self._start < self._end:
            return weekday in self._days and self._start <= minute < self._end
        began_yesterday = (weekday - 1) % 7 in self._days and minute < self._end
        return began_yesterday or (weekday in self._days and minute >= self._start)


def _minutes(text: str) -> int:
    hours, colon, minutes = text.partition(":")
    if colon and hours.isdecimal() and minutes.isdecimal() and len(minutes) == 2:
        total = int(hours) * 60 + int(minutes)
        if int(minutes) < 60 and total <= 24 * 60:
            return total
    raise ConfigError(f"'{text}' is no hour and minute from 00:00 to 24:00", param="schedules")
