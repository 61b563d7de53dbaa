"""Replicas to keep in standby and parked: the cheapest mix that keeps the SLO over what demand may become.

A declared surge decides by its queue: it grows until standby replicas are active and parked ones are awake, and is
worked off by what they serve beyond the surge. Among mixes that break the SLO for less than five seconds the cheapest
is taken. Without one, parked replicas cover the forecast from its plan to its p99 at the time that a start takes; an
active replica does all that one in standby does, at the same price.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.fleet.policy.observation import Durations
from penstock.fleet.settings import PoolSettings

MAX_BROKEN_S = 4.0  # by plan; five are promised
_NOTICED_S = 2.0  # a round, and the second that it has counted


class WarmPlan(NamedTuple):
    standby: int
    parked: int
    kept: int  # parked replicas that are not stopped: more than `parked` where they cost nothing
    reason: str


class Surge(NamedTuple):
    """Demand that becomes `rate` at once, in a pool of `num_active` replicas which serve `saturation` each."""

    rate: float
    num_active: int
    saturation: float
    ttft_s: float


def plan_warm(
    settings: PoolSettings,
    durations: Durations,
    surge: Surge | None,
    spread: int,  # replicas from the plan to the forecast's p99, when a start would be ready
    peak: int,  # replicas beyond the active ones that the last day's busiest time needed
) -> WarmPlan:
    standby = parked = 0
    reason = ""
    if surge is not None:
        standby, parked, broken_s = _for_surge(settings, durations, surge)
        reason = (
            f"a surge to {surge.rate:.3g} requests/s breaks the SLO for {broken_s:.1f} s with {standby} in standby and "
            f"{parked} parked"
        )
    elif settings.parked is None and spread > 0:
        parked = spread
        reason = f"{spread} parked cover the forecast's p99 at a start's time"
    standby = settings.standby if settings.standby is not None else standby
    parked = settings.parked if settings.parked is not None else parked
    kept = parked
    if settings.parked is None and not settings.parked_price_per_hour and peak > parked:
        kept = peak
        reason = reason or f"{peak} parked, which cost nothing, cover the last day's busiest time"
    return WarmPlan(standby, parked, kept, reason)


def _for_surge(settings: PoolSettings, durations: Durations, surge: Surge) -> tuple[int, int, float]:
    """(standby, parked, seconds in which the SLO is broken)."""
    room = max(0, settings.max - surge.num_active)
    fixed_standby, can_park = settings.standby, settings.parked != 0
    price, parked_price = settings.price_per_hour or 1.0, settings.parked_price_per_hour or 0.0
    best: tuple[float, int, int, float] | None = None
    least: tuple[float, int, int] | None = None
    for standby in range(room + 1) if fixed_standby is None else (min(room, fixed_standby),):
        if best is not None and standby * price >= best[0]:
            break
        for parked in range(room - standby + 1) if can_park else (0,):
            broken_s = broken_for(surge, durations, standby, parked)
            if least is None or broken_s < least[0] - 1e-9:
                least = (broken_s, standby, parked)
            if broken_s <= MAX_BROKEN_S:
                # A parked replica without a price still costs host memory.
                cost = standby * price + parked * (parked_price or 1e-3 * price)
                if best is None or cost < best[0]:
                    best = (cost, standby, parked, broken_s)
                break
    if best is not None:
        return best[1:]
    assert least is not None
    return least[1], least[2], least[0]


def broken_for(surge: Surge, durations: Durations, standby: int, parked: int) -> float:
    """Seconds from the first request that waits longer than the SLO allows to the last one."""
    active, rate, ttft_s = surge.num_active, surge.rate, surge.ttft_s
    capacity = active * surge.saturation
    if rate <= capacity:
        return 0.0
    began_s: float | None = None
    queue = at_s = 0.0
    steps = ((_NOTICED_S + durations.activate_s, standby), (_NOTICED_S + durations.wake_s, parked))
    for until_s, more in (*steps, (3600.0, 0)):
        growth = rate - capacity
        if growth > 0 and began_s is None and queue + growth * (until_s - at_s) > capacity * ttft_s:
            began_s = at_s + max(0.0, (capacity * ttft_s - queue) / growth)
        if growth < 0 and queue + growth * (until_s - at_s) <= capacity * ttft_s:
            if began_s is None:
                return 0.0
            return at_s + max(0.0, (queue - capacity * ttft_s) / -growth) - began_s
        queue = max(0.0, queue + growth * (until_s - at_s))
        at_s = until_s
        capacity += more * surge.saturation
        if began_s is None and growth <= 0:
            return 0.0
    return 3600.0
