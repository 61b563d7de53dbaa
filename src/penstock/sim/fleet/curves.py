"""Demand curves of our own, by name: what a service might see, so that no policy is tuned to one trace.

Rates are shares of a peak, in windows of a minute, with noise of some minutes' length that a seed decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.core.errors import ConfigError
from penstock.sim.fleet.demand import DAY_S, MINUTE_S, DemandCurve, Window, draw

_HOUR_S = 3600
_NOISE = 0.05  # of the rate, with a memory of ten minutes
_DISPERSION = 4.0  # of counts: what the quieter half of windows of a real service has

Shape = Callable[[float], float]  # share of the peak at a second since Monday's midnight


def _bump(hour: float, centre: float, width: float) -> float:
    """Returns the height at this hour of a bell around `centre`, by the clock."""
    distance = (hour - centre + 12) % 24 - 12
    return math.exp(-0.5 * (distance / width) ** 2)


def _two_peaks(at: float) -> float:
    hour = at / _HOUR_S % 24
    is_weekend = at // DAY_S % 7 >= 5
    share = 0.12 + 0.88 * max(_bump(hour, 10.5, 1.8), 0.9 * _bump(hour, 16.0, 2.2))
    return share * (0.55 if is_weekend else 1.0)


def _silent_night(at: float) -> float:
    hour = at / _HOUR_S % 24
    return 0.0 if hour < 6 or hour >= 23 else 0.15 + 0.85 * math.sin(math.pi * (hour - 6) / 17) ** 2


def _launch_day(at: float) -> float:
    """Calm until ten o'clock of the third day; then five times as much within ten minutes, which fades over hours."""
    base = 0.1 + 0.1 * math.sin(2 * math.pi * (at / DAY_S - 0.3))
    since = at - (2 * DAY_S + 10 * _HOUR_S)
    if since < 0:
        return base
    return min(1.0, base + 0.8 * min(1.0, since / 600) * math.exp(-max(0.0, since - 600) / (8 * _HOUR_S)))


def _holiday_week(at: float) -> float:
    """Two weeks of the same working days, but the second Thursday is a holiday."""
    is_holiday = at // DAY_S == 10
    return 0.35 * _two_peaks(at) + 0.05 if is_holiday else _two_peaks(at)


def _steady(at: float) -> float:
    return 0.8


SURGE_AT = 2 * _HOUR_S

_SHAPES: dict[str, tuple[Shape, int]] = {  # with the days that it takes by default
    "two-peaks": (_two_peaks, 7),
    "silent-night": (_silent_night, 5),
    "launch-day": (_launch_day, 4),
    "holiday-week": (_holiday_week, 14),
    "steady": (_steady, 1),
    "surge": (_steady, 1),
}
CURVES: Sequence[str] = tuple(_SHAPES)


def curve(
    name: str, seed: int, *, peak: float | None = None, days: float | None = None, surge: float = 3.0
) -> DemandCurve:
    """`peak`: requests/s of the busiest hour (default 300). `surge`: that curve's factor, from its third hour on for
    twenty minutes."""
    if name not in _SHAPES:
        raise ConfigError(f"no curve '{name}'; there are {', '.join(CURVES)}, or a file", param="demand")
    shape, usual_days = _SHAPES[name]
    seconds = round((days or usual_days) * DAY_S) if name != "surge" or days else 4 * _HOUR_S
    peak = peak or 300.0
    factors = _noise(seed, seconds // MINUTE_S)
    windows = []
    for minute, noise in enumerate(factors):
        at = minute * MINUTE_S
        rate = peak * shape(at + MINUTE_S / 2) * noise
        if name == "surge":
            is_surge = SURGE_AT <= at < SURGE_AT + 20 * MINUTE_S
            rate = peak * noise / surge * (surge if is_surge else 1.0)
        windows.append(Window(MINUTE_S, rate, _DISPERSION if rate else 0.0, 900.0, 150.0))
    drawn = draw(name, windows, seed)
    return replace(drawn, surge_at=SURGE_AT) if name == "surge" else drawn


def _noise(seed: int, count: int) -> list[float]:
    random = np.random.default_rng([seed, 1])
    memory = math.exp(-1 / 10)
    level, found = 0.0, []
    for shock in random.normal(0.0, _NOISE * math.sqrt(1 - memory * memory), count):
        level = memory * level + shock
        found.append(max(0.0, 1 + level))
    return found
