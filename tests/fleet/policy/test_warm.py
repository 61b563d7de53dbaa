from __future__ import annotations

from penstock.fleet.policy.observation import Durations
from penstock.fleet.policy.warm import MAX_BROKEN_S, Surge, broken_for, plan_warm
from penstock.fleet.settings import PoolSettings

FAST, SLOW = Durations(wake_s=1.0), Durations(wake_s=20.0)
TRIPLE = Surge(rate=300.0, num_active=4, saturation=30.0, ttft_s=0.7)


def test_a_surge_that_active_replicas_serve_needs_nothing() -> None:
    plan = plan_warm(PoolSettings(max=40, surge=3.0), FAST, Surge(100.0, 4, 30.0, 0.7), 0, 0)
    assert (plan.standby, plan.parked) == (0, 0)


def test_parked_replicas_that_wake_in_time_are_the_cheapest() -> None:
    plan = plan_warm(PoolSettings(max=40, surge=3.0, price_per_hour=2.0), FAST, TRIPLE, 0, 0)
    assert plan.standby == 0
    assert 4 + plan.parked > 300 / 30
    assert broken_for(TRIPLE, FAST, plan.standby, plan.parked) <= MAX_BROKEN_S
    assert "surge" in plan.reason


def test_standby_takes_over_where_waking_takes_too_long() -> None:
    plan = plan_warm(PoolSettings(max=40, surge=3.0, price_per_hour=2.0), SLOW, TRIPLE, 0, 0)
    assert plan.standby >= 7
    assert broken_for(TRIPLE, SLOW, plan.standby, plan.parked) <= MAX_BROKEN_S


def test_without_enough_room_the_plan_does_what_it_can() -> None:
    plan = plan_warm(PoolSettings(max=6, surge=3.0), SLOW, TRIPLE, 0, 0)
    assert plan.standby + plan.parked <= 2


def test_set_numbers_are_not_planned() -> None:
    plan = plan_warm(PoolSettings(max=40, surge=3.0, standby=1, parked=2), FAST, TRIPLE, 0, 9)
    assert (plan.standby, plan.parked, plan.kept) == (1, 2, 2)


def test_the_forecasts_spread_is_parked_and_what_costs_nothing_is_kept() -> None:
    free = plan_warm(PoolSettings(max=40), FAST, None, 2, 5)
    assert (free.standby, free.parked, free.kept) == (0, 2, 5)
    paid = plan_warm(PoolSettings(max=40, parked_price_per_hour=0.1), FAST, None, 2, 5)
    assert (paid.parked, paid.kept) == (2, 2)


def test_more_warm_replicas_never_break_the_slo_longer() -> None:
    for durations in (FAST, SLOW):
        for standby in range(8):
            times = [broken_for(TRIPLE, durations, standby, parked) for parked in range(12)]
            assert times == sorted(times, reverse=True)
