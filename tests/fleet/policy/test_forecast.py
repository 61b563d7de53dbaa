from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.policy.forecast import Forecaster, ForecastState
from tests.fleet.policy.fake_pool import MONDAY

DAY_S = 86400
EVERY_S = 60
HORIZONS = (60.0, 300.0, 1800.0)


def daily(at: float) -> float:
    return 100 + 80 * math.sin(2 * math.pi * (at % DAY_S) / DAY_S)


def fed(days: float, rate: Callable[[float], float] = daily, into: Forecaster | None = None) -> Forecaster:
    forecaster = into or Forecaster()
    began = forecaster.state.at or MONDAY
    for second in range(EVERY_S, int(days * DAY_S) + 1, EVERY_S):
        forecaster.observe(began + second, rate(began + second))
    return forecaster


def test_season_is_known_from_the_second_day_on() -> None:
    forecaster = fed(1.4)
    at = forecaster.state.at
    assert at is not None
    for band in forecaster.bands(at, HORIZONS):
        assert abs(band.p50 - daily(at + band.horizon_s)) < 0.05 * daily(at + band.horizon_s)


def test_a_trend_is_followed_before_any_season_is_known() -> None:
    forecaster = fed(0.1, lambda at: 100 + (at - MONDAY) / 60)
    at = forecaster.state.at
    assert at is not None
    now = 100 + (at - MONDAY) / 60
    (band,) = forecaster.bands(at, (600.0,))
    assert now + 5 < band.p50 < now + 15


def test_a_busier_day_stays_busier() -> None:
    forecaster = fed(2.0)
    fed(0.3, lambda at: 1.5 * daily(at), into=forecaster)
    at = forecaster.state.at
    assert at is not None
    (band,) = forecaster.bands(at, (1800.0,))
    assert abs(band.p50 / (1.5 * daily(at + 1800)) - 1) < 0.1


def test_a_spike_is_not_learned_as_season_at_once() -> None:
    spiked_at = MONDAY + 2 * DAY_S + 6 * 3600
    forecaster = fed(3.0, lambda at: 20 * daily(at) if spiked_at <= at < spiked_at + 1200 else daily(at))
    before = spiked_at + DAY_S - 600
    fed((before - MONDAY) / DAY_S - 3.0, into=forecaster)
    (band,) = forecaster.bands(before, (1200.0,))
    assert band.p50 < 2 * daily(before + 1200)


def test_the_band_is_as_wide_as_errors_were() -> None:
    calm, noisy = fed(2.0), fed(2.0, lambda at: daily(at) * (1.3 if int(at // 60) * 7919 % 13 < 3 else 0.9))
    for forecaster, least, most in ((calm, 0.0, 0.05), (noisy, 0.15, 0.6)):
        assert forecaster.state.at is not None
        (band,) = forecaster.bands(forecaster.state.at, (300.0,))
        assert least <= (band.p99 - band.p50) / band.p50 <= most


def test_a_morning_that_comes_out_of_nothing_does_not_widen_the_days_band() -> None:
    forecaster = fed(2.5, lambda at: 200.0 if 6 <= at % DAY_S / 3600 < 22 else 0.0)
    assert forecaster.state.at is not None
    for band in forecaster.bands(forecaster.state.at, (60.0, 300.0)):
        assert 190 < band.p50 <= band.p99 < 240


def test_a_gap_and_a_restart_keep_the_season() -> None:
    forecaster = fed(2.0)
    kept = msgspec.json.encode(forecaster.state)
    assert len(kept) < 60_000
    again = Forecaster(msgspec.json.decode(kept, type=ForecastState))
    at = MONDAY + 2 * DAY_S + 8 * 3600.0
    for second in range(0, 600, EVERY_S):
        again.observe(at + second, daily(at + second))
    (band,) = again.bands(at + 540, (1800.0,))
    assert abs(band.p50 / daily(at + 2340) - 1) < 0.15


def test_season_follows_local_time_over_the_change_of_clocks() -> None:
    """Berlin leaves summer time on 2026-10-25: nine o'clock comes an hour later by UTC."""
    friday = 1_792_713_600.0 - 86400 * 2  # 2026-10-21 00:00 UTC
    forecaster = Forecaster(timezone="Europe/Berlin")

    def busy_at_nine(at: float) -> float:
        offset_s = 7200 if at < 1_792_890_000 else 3600  # 2026-10-25 01:00 UTC
        return 100.0 if 9 <= (at + offset_s) % DAY_S / 3600 < 12 else 10.0

    for second in range(0, 7 * DAY_S, EVERY_S):
        forecaster.observe(friday + second, busy_at_nine(friday + second))
    morning = friday + 7 * DAY_S + 7.5 * 3600  # 8:30 by winter time
    for at in range(int(friday + 7 * DAY_S), int(morning), EVERY_S):
        forecaster.observe(float(at), busy_at_nine(float(at)))
    soon, later = forecaster.bands(morning, (600.0, 3600.0))
    assert soon.p50 < 40 < later.p50


@given(st.lists(st.tuples(st.floats(-100, 5000), st.floats(0, 1e6)), max_size=60))
def test_bands_are_ordered_and_finite_whatever_is_observed(samples: list[tuple[float, float]]) -> None:
    forecaster, at = Forecaster(), MONDAY
    for passed_s, rate in samples:
        at += passed_s
        forecaster.observe(at, rate)
    for band in forecaster.bands(at, HORIZONS):
        assert 0 <= band.p50 <= band.p90 <= band.p99 < math.inf
