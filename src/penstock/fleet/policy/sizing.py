"""The size of a pool: the least number that keeps the SLO under the demand expected when another would be ready.

Reaction and forecast each say a number, and the larger counts: a forecast starts capacity early and never delays a
reaction. Capacity in reserve is ready within seconds and is asked for later than a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.fleet.policy.observation import Durations, ForecastBand
from penstock.fleet.policy.signals import Signals

_SURE = 3.0  # deviations of the level by chance that a step down allows for; chosen among 2 and 3 by simulation
_MIN_MARGIN, _MAX_MARGIN = 0.01, 0.5  # of the rate: the profile rounds by two percent; half is a whole pool of bursts
_TOLERANCE = 0.93  # of the rate: a step down is taken back only if this would need it too; not derived
_CLEAR_S = 10.0  # a backlog that the pool works off by itself within this time needs no more replicas


class Sizing(NamedTuple):
    needed: int  # active replicas
    firm: int  # as many even if the rate were a little lower: what takes back a step down
    held: int  # below which the pool does not go
    urgent: bool  # no cooldown: a queue breaks the SLO, or a surge has begun
    rate: float  # arrivals/s that decided
    reason: str


def needed_for(rate: float, signals: Signals) -> int:
    """Returns the replicas that keep the SLO on average, with enough to spare for chance queues."""
    if rate <= 0:
        return 0
    most = max(rate / signals.max_rate, (rate + signals.spare) / signals.saturation)
    return math.ceil(most - 1e-9)


def planned(band: ForecastBand, caution: float) -> float:
    """Arrivals/s to plan for: somewhere from the forecast's middle to its p99."""
    return band.p50 + caution * (band.p99 - band.p50)


def band_at(bands: Sequence[ForecastBand], horizon_s: float) -> ForecastBand | None:
    """The nearest of those that are not earlier, else the last."""
    return next((each for each in bands if each.horizon_s >= horizon_s - 1e-9), bands[-1] if bands else None)


def size(
    signals: Signals,
    bands: Sequence[ForecastBand],
    durations: Durations,
    *,
    up_cooldown_s: float,
    caution: float,
    num_ready: int,
    reserve: int,
    is_surge_declared: bool = False,
) -> Sizing:
    """`num_ready`: replicas that are active or will be; `reserve`: those in standby or parked."""
    rate = signals.rate
    soon = band_at(bands, durations.wake_s)
    later = band_at(bands, durations.start_s + up_cooldown_s)
    soon_rate = max(rate, planned(soon, caution)) if soon and not reserve else rate
    later_rate = max(rate, planned(later, caution)) if later else rate
    held_rate = max([later_rate, *(planned(band, caution) for band in bands)])
    margin = 1 + min(_MAX_MARGIN, _MIN_MARGIN + _SURE * signals.level_noise)
    needed = needed_for(soon_rate, signals)
    reason, decided = "demand", soon_rate
    if (with_reserve := needed_for(later_rate, signals) - reserve) > needed:
        needed, decided = with_reserve, later_rate
    if decided > rate:
        reason = "forecast"
    held = max(
        needed_for(soon_rate * margin, signals),
        needed_for(held_rate * margin, signals) - reserve,
    )
    urgent = False
    if (
        is_surge_declared
        and signals.surge > rate
        and (fast := min(needed_for(signals.surge, signals), num_ready + reserve)) > needed
    ):
        needed, decided, reason, urgent = fast, signals.surge, "surge", True
    if signals.breaks_slo:
        behind = _with_backlog(signals, durations, num_ready, reserve)
        urgent = True
        if needed_for(behind, signals) > needed:
            needed, decided, reason = needed_for(behind, signals), behind, "queue"
    firm = needed_for(decided * min(_TOLERANCE, 1 / margin), signals)
    return Sizing(needed, min(firm, needed), max(held, needed), urgent, decided, reason)


def _with_backlog(signals: Signals, durations: Durations, num_ready: int, reserve: int) -> float:
    """Arrivals/s, and what will be left of the queue when capacity is ready, worked off in as long again."""
    ready_s = max(_CLEAR_S, durations.wake_s if reserve else durations.start_s)
    left = max(0.0, signals.backlog + (signals.rate - num_ready * signals.saturation) * ready_s)
    return signals.rate + left / ready_s
