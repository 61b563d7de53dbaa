from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError
from penstock.fleet.policy.bounds import Bounds, ScheduledBounds
from penstock.fleet.settings import PoolSettings, Schedule
from tests.fleet.policy.fake_pool import MONDAY

HOUR_S = 3600.0


def at(hour: float, schedules: list[Schedule], timezone: str = "UTC", **more: int) -> Bounds:
    settings = PoolSettings(min=more.get("min", 1), max=more.get("max", 10), schedules=schedules, timezone=timezone)
    return ScheduledBounds(settings).at(MONDAY + hour * HOUR_S)


def test_hours_of_some_days() -> None:
    schedule = Schedule(["mon", "tue"], "08:00", "18:30", min=4)
    for hour, low in ((7.9, 1), (8, 4), (18.4, 4), (18.5, 1), (24 + 9, 4), (48 + 9, 1)):
        assert at(hour, [schedule]).min == low


def test_hours_past_midnight_belong_to_the_day_on_which_they_began() -> None:
    schedule = Schedule(["fri"], "22:00", "03:00", max=2)
    friday = 4 * 24
    for hour, high in ((friday + 1, 10), (friday + 23, 2), (friday + 26, 2), (friday + 27, 10)):
        assert at(hour, [schedule]).max == high


def test_hours_are_the_time_zones() -> None:
    schedule = Schedule([], "09:00", "10:00", min=3)
    assert at(8.5, [schedule], "Europe/Berlin").min == 3
    assert at(9.5, [schedule], "Europe/Berlin").min == 1


def test_several_schedules_and_the_settings_max() -> None:
    both = [Schedule(min=3), Schedule(min=5), Schedule(max=7), Schedule(max=50)]
    assert at(1, both) == Bounds(5, 7, "schedule", "schedule")
    assert at(1, [Schedule(min=50)]).min == 10


@pytest.mark.parametrize("text", ["8", "25:00", "08:60", "noon", "24:01", "-1:00"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="no hour and minute"):
        at(0, [Schedule(start=text)])


def test_an_unknown_time_zone_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Atlantis"):
        at(0, [], "Atlantis")
