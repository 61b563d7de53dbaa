"""The forecast of a pool's arrivals: season by time of week, level and trend, as quantiles.

Season      means of 10 minutes by local time of week and by time of day; a bucket of the week that was seen once counts
            as much as all days, and more with each week. Useful from the second day on.
Level       the last minutes against the season: a busier day than usual stays busier.
Trend       where the last minutes lead without any season: all there is on the first day.
Which of the two is believed, and how wide the band is, follows from past errors at each time ahead.

A bucket moves by a factor of two at most from what was expected, so that a spike or an outage is not learned as season.
It reads no clock: `observe` is told the time. All it knows is in `ForecastState`, some 20 kB of JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from msgspec import Struct, field

from penstock.fleet.policy.observation import ForecastBand

BUCKET_S = 600.0
MINUTE_S = 60.0
_DAY_BUCKETS, _WEEK_BUCKETS = 144, 1008
_AHEAD = (1, 2, 5, 10, 30)  # minutes for which errors are kept
_LEVEL_S, _TREND_S = 60.0, 600.0  # time constants
_MAX_TREND_S = 900.0  # a trend leads no further
_GAP_S = 300.0  # longer without a sample: level and trend begin anew
_SOFT = 0.1  # requests/s that errors are told against at least
_ERROR_WEIGHT = 0.03  # of a new squared error: half an hour is remembered
_QUANTILES = (0.5, 0.9, 0.99)
_QUIET = 0.1  # of the peak
_KEPT_EVERY, _MIN_KEPT, _MAX_KEPT = 4, 30, 360  # errors: every fourth minute, used after two hours, for a day
_EPOCH_DAY = 3  # 1970-01-01 was a Thursday; weeks begin on Monday


class HorizonErrors(Struct):
    """Errors of past forecasts at one time ahead, as shares of what was forecast."""

    season: float = 0.04  # mean squares
    trend: float = 0.01
    recent: list[float] = field(default_factory=list)  # of a day, every fourth minute
    quantiles: list[float] = field(default_factory=lambda: [0.0, 0.12, 0.3])  # of them


class Pending(Struct, array_like=True):
    """A forecast that waits for what comes true."""

    minute: int  # it is for
    season: float  # negative: there was none
    trend: float
    mixed: float


class ForecastState(Struct):
    day: list[float] = field(default_factory=lambda: [0.0] * _DAY_BUCKETS)  # requests/s
    day_seen: list[int] = field(default_factory=lambda: [0] * _DAY_BUCKETS)
    week: list[float] = field(default_factory=lambda: [0.0] * _WEEK_BUCKETS)
    week_seen: list[int] = field(default_factory=lambda: [0] * _WEEK_BUCKETS)
    errors: list[HorizonErrors] = field(default_factory=lambda: [HorizonErrors() for _ in _AHEAD])
    pending: list[list[Pending]] = field(default_factory=lambda: [[] for _ in _AHEAD])
    at: float | None = None  # of the last sample
    peak: float = 0.0  # requests/s of the busiest minute of a day or so
    level: float = 0.0
    slow: float = 0.0
    ratio_level: float = 0.0  # level and season over the last minutes: their ratio is how busy this day is
    ratio_season: float = 0.0
    minute: int = 0
    minute_sum: float = 0.0
    minute_s: float = 0.0
    bucket: int = -1  # of the week, under way
    bucket_sum: float = 0.0
    bucket_s: float = 0.0


class Forecaster:
    def __init__(self, state: ForecastState | None = None, *, timezone: str = "UTC") -> None:
        self.state = state or ForecastState()
        self._zone = ZoneInfo(timezone)
        self._offset_hour = -1
        self._offset_s = 0.0

    def observe(self, at: float, arrivals_per_s: float) -> None:
        """The mean rate since the last call. A time that has been is left out."""
        state = self.state
        if state.at is None or at - state.at > _GAP_S:
            self._begin_anew(at, arrivals_per_s)
            return
        passed_s = at - state.at
        if passed_s <= 0:
            return
        state.at = at
        state.level += (arrivals_per_s - state.level) * -math.expm1(-passed_s / _LEVEL_S)
        state.slow += (arrivals_per_s - state.slow) * -math.expm1(-passed_s / _TREND_S)
        minute = int(at // MINUTE_S)
        if minute != state.minute:
            self._end_minute()
            state.minute, state.minute_sum, state.minute_s = minute, 0.0, 0.0
        state.minute_sum += arrivals_per_s * passed_s
        state.minute_s += passed_s

    def bands(self, at: float, horizons: Sequence[float]) -> tuple[ForecastBand, ...]:
        """Expected arrivals per second, so many seconds after `at`."""
        found = []
        for horizon_s in horizons:
            index = _nearest(horizon_s / MINUTE_S)
            errors = self.state.errors[index]
            season, trend = self._candidates(at, horizon_s)
            middle = _mixed(season, trend, errors)
            low, high, highest = (middle + each * (middle + _SOFT) for each in errors.quantiles)
            low = max(0.0, low)
            high = max(low, high)
            found.append(ForecastBand(horizon_s, low, high, max(high, highest)))
        return tuple(found)

    def _begin_anew(self, at: float, rate: float) -> None:
        state = self.state
        state.at, state.level, state.slow = at, rate, rate
        state.ratio_level = state.ratio_season = 0.0
        state.minute, state.minute_sum, state.minute_s = int(at // MINUTE_S), 0.0, 0.0
        state.bucket, state.bucket_sum, state.bucket_s = -1, 0.0, 0.0
        state.pending = [[] for _ in _AHEAD]

    def _end_minute(self) -> None:
        state = self.state
        if state.minute_s < MINUTE_S / 2:
            return
        rate, at = state.minute_sum / state.minute_s, (state.minute + 0.5) * MINUTE_S
        state.peak = max(state.peak * (1 - MINUTE_S / 86400.0), rate)
        for errors, pending in zip(state.errors, state.pending, strict=True):
            while pending and pending[0].minute <= state.minute:
                said = pending.pop(0)
                if said.minute == state.minute:
                    _learn(errors, said, rate, state.peak)
        season = self._season(at)
        if season is not None:
            state.ratio_level += 0.2 * (rate - state.ratio_level)
            state.ratio_season += 0.2 * (season - state.ratio_season)
        end = (state.minute + 1) * MINUTE_S
        for index, ahead in enumerate(_AHEAD):
            season, trend = self._candidates(end, (ahead - 0.5) * MINUTE_S)
            mixed = _mixed(season, trend, state.errors[index])
            state.pending[index].append(
                Pending(state.minute + ahead, -1.0 if season is None else round(season, 4), round(trend, 4), mixed)
            )
        bucket = self._bucket(at)
        if bucket != state.bucket:
            self._end_bucket()
            state.bucket, state.bucket_sum, state.bucket_s = bucket, 0.0, 0.0
        state.bucket_sum += state.minute_sum
        state.bucket_s += state.minute_s

    def _end_bucket(self) -> None:
        state = self.state
        if state.bucket < 0 or state.bucket_s < BUCKET_S / 2:
            return
        rate = state.bucket_sum / state.bucket_s
        day = state.bucket % _DAY_BUCKETS
        state.day[day] = _moved(state.day[day], rate, state.day_seen[day], 0.4)
        state.day_seen[day] += 1
        state.week[state.bucket] = _moved(state.week[state.bucket], rate, state.week_seen[state.bucket], 0.4)
        state.week_seen[state.bucket] += 1

    def _candidates(self, at: float, horizon_s: float) -> tuple[float | None, float]:
        """Forecast of season and level, and that of level and trend."""
        state = self.state
        slope = (state.level - state.slow) / (_TREND_S - _LEVEL_S)
        ahead_s = _LEVEL_S + min(horizon_s, _MAX_TREND_S)
        trend = min(2 * state.level, max(0.5 * state.level, state.level + slope * ahead_s))
        season = self._season(at + horizon_s)
        if season is not None and state.ratio_season > 0:
            ratio = (state.ratio_level + _SOFT) / (state.ratio_season + _SOFT)
            season *= min(10.0, max(0.1, ratio)) ** math.exp(-horizon_s / 7200.0)
        return season, trend

    def _season(self, at: float) -> float | None:
        """Returns the season between the middles of two buckets, along the line. None: it was never seen."""
        position = self._local(at) / BUCKET_S - 0.5
        first = math.floor(position)
        part = position - first
        one, two = self._seasonal(first % _WEEK_BUCKETS), self._seasonal((first + 1) % _WEEK_BUCKETS)
        if one is None or two is None:
            return two if one is None else one
        return one + (two - one) * part

    def _seasonal(self, bucket: int) -> float | None:
        state, day = self.state, bucket % _DAY_BUCKETS
        seen = state.week_seen[bucket]
        if not state.day_seen[day]:
            return None
        return (seen * state.week[bucket] + state.day[day]) / (seen + 1) if seen else state.day[day]

    def _bucket(self, at: float) -> int:
        return int(self._local(at) // BUCKET_S) % _WEEK_BUCKETS

    def _local(self, at: float) -> float:
        """Seconds of local time since a Monday's midnight, long ago."""
        hour = int(at // 900)  # no zone changes its offset more often
        if hour != self._offset_hour:
            offset = datetime.fromtimestamp(at, UTC).astimezone(self._zone).utcoffset()
            self._offset_hour, self._offset_s = hour, offset.total_seconds() if offset else 0.0
        return at + self._offset_s + _EPOCH_DAY * 86400.0


def _moved(old: float, rate: float, seen: int, weight: float) -> float:
    if not seen:
        return round(rate, 3)
    bounded = min(2 * old + _SOFT, max(0.5 * old, rate))
    return round(old + (bounded - old) * max(weight, 1 / (seen + 1)), 3)


def _mixed(season: float | None, trend: float, errors: HorizonErrors) -> float:
    """Each by the inverse of its mean squared error."""
    if season is None:
        return trend
    weight = errors.trend / (errors.trend + errors.season)
    return weight * season + (1 - weight) * trend


def _learn(errors: HorizonErrors, said: Pending, rate: float, peak: float) -> None:
    if said.season >= 0:
        errors.season += _ERROR_WEIGHT * (min(4.0, _relative(rate, said.season) ** 2) + 1e-6 - errors.season)
    errors.trend += _ERROR_WEIGHT * (min(4.0, _relative(rate, said.trend) ** 2) + 1e-6 - errors.trend)
    if said.minute % _KEPT_EVERY or said.mixed < _QUIET * peak:
        return  # a night's errors, as shares of next to nothing, say nothing of the day's
    errors.recent.append(round(min(1.0, max(-1.0, _relative(rate, said.mixed))), 3))
    if len(errors.recent) > _MAX_KEPT:
        del errors.recent[0]
    if len(errors.recent) >= _MIN_KEPT:
        ordered = sorted(errors.recent)
        errors.quantiles = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in _QUANTILES]


def _relative(rate: float, forecast: float) -> float:
    return (rate - forecast) / (forecast + _SOFT)


def _nearest(minutes: float) -> int:
    """The shortest time ahead with errors of its own that is not shorter than this."""
    return next((i for i, ahead in enumerate(_AHEAD) if ahead >= minutes), len(_AHEAD) - 1)
