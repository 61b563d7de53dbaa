"""Rules of the policy, one at a time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import ActionKind
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import CapacityType, Durations, ForecastBand, Offer, ReplicaState
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.settings import PoolSettings, Schedule, SpotSettings
from tests.fleet.policy.fake_pool import MONDAY, RATE, SLO, FakePool, demand, views

ONLY_ACTIVE = PoolSettings(min=1, max=20, standby=0, parked=0)


def pool(active: int, settings: PoolSettings = ONLY_ACTIVE, **more: object) -> FakePool:
    made = FakePool(settings, **more)  # type: ignore[arg-type]
    made.add(views(active))
    return made


# How many


def test_a_pool_grows_to_what_demand_needs_in_one_step_and_waits_for_it() -> None:
    fleet = pool(1)
    fleet.run(3, demand(0.5 * RATE))
    fleet.run(90, demand(4.5 * RATE))
    assert fleet.num_active in (5, 6)
    assert sum(len(each.actions) for each in fleet.decisions) == fleet.num_active - 1
    assert fleet.decisions[0].actions[0].reason


def test_two_steps_up_are_a_cooldown_apart_unless_a_queue_breaks_the_slo() -> None:
    fleet = pool(2)
    fleet.run(5, demand(1.2 * RATE))
    fleet.run(20, demand(2.6 * RATE))
    began = fleet.num_started
    assert began > 0
    fleet.run(20, demand(4.6 * RATE))
    assert fleet.num_started == began
    fleet.run(2, demand(4.6 * RATE, waiting=500, waiting_tokens=250_000))
    assert fleet.num_started > began
    assert "queue" in fleet.decisions[-1].reason


def test_a_pool_shrinks_only_after_less_was_enough_for_twice_a_start() -> None:
    fleet = pool(4)
    fleet.run(60, demand(3.2 * RATE))
    fleet.run(119, demand(0.5 * RATE))
    assert fleet.decisions == []
    fleet.run(400, demand(0.5 * RATE))
    assert fleet.num_active == 1
    assert 2 <= len(fleet.decisions) <= 3


def test_a_short_cooldown_is_as_short_as_it_says() -> None:
    fleet = pool(3, replace(ONLY_ACTIVE, down_cooldown_s=5.0))
    fleet.run(60, demand(2.5 * RATE))
    fleet.run(3, demand(0.1 * RATE))
    assert fleet.decisions == []
    fleet.run(90, demand(0.1 * RATE))
    assert fleet.num_active == 1


def test_a_step_up_is_not_taken_back_within_the_cooldown() -> None:
    fleet = pool(1)
    fleet.run(3, demand(0.5 * RATE))
    fleet.run(90, demand(3.5 * RATE))
    ups, up_at = len(fleet.decisions), fleet.decisions[-1].at
    fleet.run(int(up_at + 300 - fleet.now), demand(0.5 * RATE))
    assert len(fleet.decisions) == ups > 0
    fleet.run(100, demand(0.5 * RATE))
    assert fleet.num_active < 4


def test_a_pool_shrinks_by_half_of_what_is_too_much_then_looks_again() -> None:
    fleet = pool(60, PoolSettings(min=1, max=100, standby=0, parked=0))
    fleet.run(600, demand(10 * RATE))
    steps = [len(each.actions) for each in fleet.decisions]
    assert steps == sorted(steps, reverse=True)
    assert len(steps) <= 7
    assert 10 <= fleet.num_active <= 12


def test_what_a_passed_peak_wanted_and_has_not_come_is_not_started_any_more() -> None:
    fleet = pool(2, offers=(Offer(available=0),))
    fleet.run(3, demand(1.2 * RATE))
    fleet.run(30, demand(4.5 * RATE))
    fleet.run(200, demand(1.2 * RATE))
    fleet.offers = (Offer(),)
    fleet.run(5, demand(1.2 * RATE))
    assert fleet.num_started == 0


def test_a_single_second_is_no_reason_to_start_what_is_ready_in_a_minute() -> None:
    fleet = pool(3)
    fleet.run(120, demand(2.0 * RATE))
    burst = demand(2.0 * RATE + 40 * RATE / 15, peak_arrivals_per_s=42 * RATE)
    fleet.run(5, burst)
    fleet.run(10, demand(2.0 * RATE + 40 * RATE / 15))
    fleet.run(60, demand(2.0 * RATE))
    assert fleet.decisions == []


def test_a_forecast_starts_capacity_before_its_time_and_holds_back_a_step_down() -> None:
    rise = tuple(ForecastBand(horizon, 4.5 * RATE, 4.6 * RATE, 4.7 * RATE) for horizon in (2.0, 120.0, 360.0))
    fleet = pool(2, forecast=rise)
    fleet.run(2, demand(1.2 * RATE))
    assert fleet.num_started >= 3
    assert "expected" in fleet.decisions[0].reason
    fleet.run(1000, demand(1.2 * RATE))
    assert fleet.num_active >= 5


def test_a_forecast_of_nothing_delays_no_reaction() -> None:
    calm = tuple(ForecastBand(horizon, 0.0, 0.0, 0.0) for horizon in (2.0, 120.0, 360.0))
    with_forecast, without = pool(1, forecast=calm), pool(1)
    for fleet in (with_forecast, without):
        fleet.run(30, demand(3.5 * RATE))
    assert with_forecast.num_started == without.num_started > 0


def test_prediction_can_be_turned_off() -> None:
    rise = (ForecastBand(120.0, 4.5 * RATE, 4.6 * RATE, 4.7 * RATE),)
    fleet = pool(2, replace(ONLY_ACTIVE, predict=False), forecast=rise)
    fleet.run(5, demand(1.2 * RATE))
    assert fleet.decisions == []


def test_thresholds_take_the_place_of_the_prediction() -> None:
    fleet = pool(2, replace(ONLY_ACTIVE, scale_on={"kv_usage": 0.8}))
    fleet.run(5, demand(10 * RATE, kv_usage=0.5))
    assert fleet.decisions == []
    fleet.run(5, demand(0.1 * RATE, kv_usage=0.9))
    assert fleet.num_started == 1
    assert "kv_usage" in fleet.decisions[0].reason


def test_without_a_profile_the_slo_is_the_threshold() -> None:
    fleet = pool(1)
    fleet.policy.profile = None
    fleet.run(5, demand(1000.0))
    assert fleet.decisions == []
    fleet.run(3, demand(1000.0, wait_p95_s=3.0))
    assert fleet.num_started == 1


def test_a_pool_that_is_used_by_nobody_sleeps_and_wakes_for_the_first_request() -> None:
    fleet = pool(1, PoolSettings(min=0, max=4, standby=0, parked=0, idle_s=100.0))
    fleet.run(90, demand(0.0))
    assert fleet.num_active == 1
    fleet.run(500, demand(0.0))
    assert fleet.replicas == {}
    decision = fleet.step(demand(0.0, held=1, waiting=1))
    assert [(each.kind, each.reason) for each in decision.actions] == [(ActionKind.START, "a request waits")]


# Bounds


def test_max_decides_and_is_named() -> None:
    fleet = pool(1, replace(ONLY_ACTIVE, max=3))
    decision = fleet.run(5, demand(10 * RATE))
    assert (decision.wanted, decision.bound) == (3, "max")


def test_spend_that_leaves_no_room_for_a_planned_standby_is_named() -> None:
    settings = replace(ONLY_ACTIVE, min=2, standby=2, max_spend_per_hour=7.0)
    decision = FakePool(settings, offers=(Offer(price_per_hour=2.0),)).run(10, demand(0.0))
    assert (decision.standby, decision.warm_bound, decision.bound) == (2, "spend", "min")


def test_spend_decides_and_is_named() -> None:
    fleet = FakePool(replace(ONLY_ACTIVE, max_spend_per_hour=7.0), offers=(Offer(price_per_hour=2.0),))
    fleet.add(views(1, price_per_hour=2.0))
    decision = fleet.run(5, demand(10 * RATE))
    assert decision.bound == "spend"
    assert len(fleet.replicas) == 3


def test_quota_decides_and_is_named() -> None:
    fleet = pool(1, offers=(Offer(available=2),))
    decision = fleet.step(demand(10 * RATE))
    assert (decision.bound, len(decision.actions)) == ("quota", 2)


def test_a_schedule_raises_the_pool_at_its_hour_without_a_cooldown() -> None:
    settings = replace(ONLY_ACTIVE, schedules=[Schedule(["mon"], "00:01", "01:00", min=5)])
    fleet = pool(1, settings)
    fleet.run(59, demand(0.1 * RATE))
    assert fleet.decisions == []
    decision = fleet.run(3, demand(0.1 * RATE))
    assert fleet.num_started == 4
    assert decision.bound == "schedule"


# States


def test_standby_goes_first_then_parked_then_a_start() -> None:
    fleet = pool(1, replace(ONLY_ACTIVE, standby=None, parked=None))
    fleet.add(views(1, ReplicaState.STANDBY, first=10))
    fleet.add(views(1, ReplicaState.PARKED, first=20))
    decision = fleet.step(demand(3.4 * RATE))
    kinds = [each.kind for each in decision.actions]
    assert kinds == [ActionKind.ACTIVATE, ActionKind.WAKE, *[ActionKind.START] * (len(kinds) - 2)]
    assert len(kinds) >= 3


def test_a_pool_that_shrinks_keeps_free_parked_replicas_for_the_next_peak() -> None:
    fleet = pool(4, PoolSettings(min=1, max=4))
    fleet.run(60, demand(3.2 * RATE))
    fleet.run(900, demand(0.5 * RATE))
    assert (fleet.num_active, fleet.count(ReplicaState.PARKED)) == (1, 3)


def test_parked_replicas_with_a_price_are_stopped_when_nothing_needs_them() -> None:
    fleet = pool(4, PoolSettings(min=1, max=4, price_per_hour=2.0, parked_price_per_hour=0.5))
    fleet.run(60, demand(3.2 * RATE))
    fleet.run(1500, demand(0.5 * RATE))
    assert (fleet.num_active, len(fleet.replicas)) == (1, 1)


def test_replica_that_passes_through_standby_to_be_parked_counts_as_parked() -> None:
    fleet = pool(1, PoolSettings(min=1, max=3, standby=0, parked=1))
    (started,) = views(1, ReplicaState.STANDBY, first=1)
    fleet.add([msgspec.structs.replace(started, target=ReplicaState.PARKED)])
    assert fleet.run(1, demand(0.1)).actions == ()


def test_set_standby_is_kept_filled() -> None:
    fleet = pool(1, PoolSettings(min=1, max=4, standby=1, parked=0))
    fleet.run(70, demand(0.5 * RATE))
    assert (fleet.num_active, fleet.count(ReplicaState.STANDBY)) == (1, 1)
    fleet.run(5, demand(1.5 * RATE))
    assert fleet.num_active == 2
    fleet.run(70, demand(1.5 * RATE))
    assert fleet.count(ReplicaState.STANDBY) == 1


def test_a_declared_surge_is_answered_from_what_was_kept_warm() -> None:
    fleet = pool(2, PoolSettings(min=1, max=20, surge=3.0), durations=Durations(wake_s=1.0))
    fleet.run(200, demand(1.5 * RATE))
    assert fleet.count(ReplicaState.PARKED) + fleet.count(ReplicaState.STANDBY) >= 3
    fleet.run(4, demand(1.7 * RATE, peak_arrivals_per_s=4.5 * RATE))
    assert fleet.num_active >= 5


# Interruptions, zones, spot


def test_an_interrupted_replica_is_replaced_first_and_drained_before_its_deadline() -> None:
    fleet = pool(2)
    fleet.step(demand(1.5 * RATE))
    fleet.replicas["r0"] = msgspec.structs.replace(fleet.replicas["r0"], deadline=fleet.now + 120)
    decision = fleet.step(demand(1.5 * RATE))
    assert [each.kind for each in decision.actions] == [ActionKind.START, ActionKind.STOP]
    assert decision.actions[1].replica == "r0"
    assert decision.actions[1].grace_s is not None
    assert decision.actions[1].grace_s < 120


def test_the_last_replica_serves_until_its_replacement_does_or_it_has_to_go() -> None:
    fleet = pool(1)
    fleet.step(demand(0.5 * RATE))
    fleet.replicas["r0"] = msgspec.structs.replace(fleet.replicas["r0"], deadline=fleet.now + 120)
    decision = fleet.step(demand(0.5 * RATE))
    assert [each.kind for each in decision.actions] == [ActionKind.START]
    fleet.run(63, demand(0.5 * RATE))
    assert [each.kind for each in fleet.decisions[-1].actions] == [ActionKind.STOP]
    assert fleet.num_active == 1


def test_a_lost_zones_share_is_started_in_the_others_and_comes_back() -> None:
    settings = replace(ONLY_ACTIVE, zones=["a", "b", "c"])
    fleet = FakePool(settings, offers=[Offer(zone) for zone in "abc"])
    fleet.run(70, demand(5.2 * RATE))
    zones = [each.zone for each in fleet.replicas.values()]
    assert {zones.count(zone) for zone in "abc"} == {2}
    for name in [each.id for each in fleet.replicas.values() if each.zone == "a"]:
        del fleet.replicas[name]
    fleet.offers = [Offer("a", refused_until=fleet.now + 1000), Offer("b"), Offer("c")]
    decision = fleet.step(demand(5.2 * RATE))
    assert sorted(each.zone for each in decision.actions) == ["b", "c"]
    fleet.run(2500, demand(5.2 * RATE))
    zones = [each.zone for each in fleet.replicas.values()]
    assert [zones.count(zone) for zone in "abc"] == [2, 2, 2]


def test_spot_is_overflow_up_to_its_share_and_refused_spot_becomes_on_demand_until_it_is_back() -> None:
    spot, plain = Offer("", CapacityType.SPOT, 1.0), Offer("", CapacityType.ON_DEMAND, 3.0)
    settings = replace(ONLY_ACTIVE, min=2, spot=SpotSettings(share=0.5, retry_s=100.0))
    fleet = FakePool(settings, offers=[msgspec.structs.replace(spot, refused_until=MONDAY + 300), plain])
    fleet.run(100, demand(5.2 * RATE))
    assert {each.capacity_type for each in fleet.replicas.values()} == {CapacityType.ON_DEMAND}
    fleet.run(3000, demand(5.2 * RATE))
    types = [each.capacity_type for each in fleet.replicas.values()]
    assert types.count(CapacityType.SPOT) == len(types) // 2
    assert len(types) in (6, 7)


def test_memory_survives_a_restart_as_json() -> None:
    fleet = pool(3)
    fleet.run(100, demand(2.0 * RATE))
    again = msgspec.json.decode(msgspec.json.encode(fleet.memory), type=PolicyMemory)
    assert again == fleet.memory


def test_numbers_explain_a_decision() -> None:
    fleet = pool(1)
    fleet.run(3, demand(4.5 * RATE))
    numbers = fleet.decisions[0].numbers
    assert numbers["predicted_ttft_s"] <= SLO.ttft_s
    assert numbers["max_rate"] == pytest.approx(RATE, rel=0.01)


def test_an_slo_that_no_replica_keeps_is_planned_within_reason() -> None:
    settings = PoolSettings(min=1, max=8, standby=0, parked=0)
    fleet = FakePool(settings, slo=Slo(ttft_s=0.001, tpot_s=0.0001))
    fleet.add(views(1))
    fleet.run(70, demand(2 * RATE))
    assert 2 <= fleet.num_active <= 8
    assert isinstance(fleet.policy, PoolPolicy)
