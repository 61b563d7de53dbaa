"""What holds for every observation: bounds, one action per replica, the same answer each time, more for more."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from penstock.fleet.policy.decision import ActionKind, Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import (
    CapacityType,
    Demand,
    ForecastBand,
    Offer,
    PoolObservation,
    ReplicaState,
    ReplicaView,
)
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile
from penstock.fleet.settings import PoolSettings, SpotSettings
from tests.examples import examples
from tests.fleet.policy.fake_pool import COSTS, MONDAY, RATE, SLO, FakePool, demand, views

PROFILE = CapacityProfile(COSTS)
GOING = {ReplicaState.STOPPING}
PRICE = 2.0


@st.composite
def settings_of_pools(draw: st.DrawFn) -> PoolSettings:
    low = draw(st.integers(0, 4))
    return PoolSettings(
        min=low,
        max=draw(st.integers(max(1, low), 12)),
        standby=draw(st.sampled_from([None, 0, 2])),
        parked=draw(st.sampled_from([None, 0, 2])),
        surge=draw(st.sampled_from([1.0, 3.0])),
        price_per_hour=PRICE,
        max_spend_per_hour=draw(st.sampled_from([None, 5.0, 11.0])),
        zones=draw(st.sampled_from([[], ["a", "b"], ["a", "b", "c"]])),
        spot=SpotSettings(share=draw(st.sampled_from([0.0, 0.5]))),
    )


demands = st.builds(
    lambda rate, waiting, peak: demand(
        rate, waiting=waiting, waiting_tokens=500 * waiting, peak_arrivals_per_s=rate * peak
    ),
    st.floats(0, 15 * RATE),
    st.integers(0, 1000),
    st.floats(1, 5),
)
replicas_of_pools = st.lists(
    st.builds(
        ReplicaView,
        id=st.integers(0, 30).map(str),
        state=st.sampled_from(ReplicaState),
        since=st.just(MONDAY - 100),
        target=st.sampled_from([ReplicaState.ACTIVE, ReplicaState.STANDBY, ReplicaState.PARKED, ReplicaState.STOPPING]),
        zone=st.sampled_from(["a", "b"]),
        capacity_type=st.sampled_from(CapacityType),
        price_per_hour=st.just(PRICE),
        deadline=st.sampled_from([None, None, None, MONDAY + 20, MONDAY + 300]),
        in_flight=st.integers(0, 5),
    ),
    max_size=12,
    unique_by=lambda each: each.id,
)


@st.composite
def observations(draw: st.DrawFn) -> PoolObservation:
    bands = tuple(
        ForecastBand(horizon, middle, middle * 1.1, middle * 1.3)
        for horizon, middle in ((2.0, draw(st.floats(0, 10 * RATE))), (120.0, draw(st.floats(0, 10 * RATE))))
    )
    offers = tuple(
        Offer(zone, kind, PRICE, draw(st.sampled_from([None, 0, 3])), draw(st.sampled_from([0.0, MONDAY + 50])))
        for zone in ("a", "b", "c")
        for kind in CapacityType
    )
    return PoolObservation(
        "pool",
        draw(demands),
        tuple(draw(replicas_of_pools)),
        forecast=draw(st.sampled_from([(), bands])),
        offers=offers,
    )


def decide(settings: PoolSettings, seen: PoolObservation, memory: PolicyMemory | None = None) -> Decision:
    return PoolPolicy(settings, SLO, PROFILE).decide(seen, memory or PolicyMemory(), MONDAY)[0]


@given(settings_of_pools(), observations())
def test_wanted_is_within_bounds_and_nothing_starts_beyond_max_or_spend(
    settings: PoolSettings, seen: PoolObservation
) -> None:
    decision = decide(settings, seen)
    assert settings.min <= decision.wanted <= settings.max
    starts = sum(each.kind is ActionKind.START for each in decision.actions)
    wakes = sum(each.kind is ActionKind.WAKE for each in decision.actions)
    staying = sum(
        each.target not in GOING and each.state not in GOING and each.deadline is None for each in seen.replicas
    )
    assert not starts or staying + starts <= settings.max + sum(
        each.state is ReplicaState.DRAINING and each.target is ReplicaState.ACTIVE for each in seen.replicas
    )
    if settings.max_spend_per_hour is not None and starts + wakes:
        spent = sum(PRICE for each in seen.replicas if each.state is not ReplicaState.PARKED)
        assert spent + (starts + wakes) * PRICE <= settings.max_spend_per_hour + 1e-6


@given(settings_of_pools(), observations())
def test_no_replica_has_two_actions_and_each_fits_its_state(settings: PoolSettings, seen: PoolObservation) -> None:
    named = [each.replica for each in decide(settings, seen).actions if each.replica]
    assert len(named) == len(set(named))
    states = {each.id: each.state for each in seen.replicas}
    for action in decide(settings, seen).actions:
        assert action.reason
        match action.kind:
            case ActionKind.ACTIVATE:
                assert states[action.replica] is ReplicaState.STANDBY
            case ActionKind.WAKE:
                assert states[action.replica] is ReplicaState.PARKED
            case ActionKind.DEACTIVATE:
                assert states[action.replica] is ReplicaState.ACTIVE
            case ActionKind.START:
                assert action.replica == ""


@given(settings_of_pools(), observations())
def test_only_an_interruption_bounds_a_drain(settings: PoolSettings, seen: PoolObservation) -> None:
    """Streams of a replica that goes for want of demand have all the time they need."""
    deadlines = {each.id: each.deadline for each in seen.replicas}
    for action in decide(settings, seen).actions:
        if action.grace_s is not None:
            assert deadlines[action.replica] is not None


@given(settings_of_pools(), observations())
def test_active_replicas_go_only_down_to_what_is_wanted(settings: PoolSettings, seen: PoolObservation) -> None:
    decision = decide(settings, seen)
    active = {each.id for each in seen.replicas if each.state is ReplicaState.ACTIVE and each.deadline is None}
    leaving = {each.replica for each in decision.actions} & active
    assert not leaving or len(active) - len(leaving) >= decision.wanted


@given(settings_of_pools(), observations())
def test_the_same_is_decided_each_time_and_after_a_restart(settings: PoolSettings, seen: PoolObservation) -> None:
    policy = PoolPolicy(settings, SLO, CapacityProfile(COSTS))
    first, memory = policy.decide(seen, PolicyMemory(), MONDAY)
    assert policy.decide(seen, PolicyMemory(), MONDAY) == (first, memory)
    kept = msgspec.json.decode(msgspec.json.encode(memory), type=PolicyMemory)
    again = PoolPolicy(settings, SLO, CapacityProfile(COSTS)).decide(seen, kept, MONDAY + 1)
    assert again == policy.decide(seen, memory, MONDAY + 1)


@given(settings_of_pools(), observations(), st.floats(1, 4))
def test_more_demand_never_wants_less(settings: PoolSettings, seen: PoolObservation, factor: float) -> None:
    settings = replace(settings, surge=1.0)
    less = seen.demand
    more = msgspec.structs.replace(
        less,
        arrivals_per_s=less.arrivals_per_s * factor,
        peak_arrivals_per_s=less.peak_arrivals_per_s * factor,
        waiting=int(less.waiting * factor),
        waiting_tokens=int(less.waiting_tokens * factor),
    )
    assert decide(settings, seen).wanted <= decide(settings, msgspec.structs.replace(seen, demand=more)).wanted


@hypothesis_settings(max_examples=examples(10))
@given(st.lists(st.tuples(st.floats(0, 8), st.integers(1, 200)), min_size=1, max_size=8), st.integers(0, 2))
def test_over_time_a_pool_stays_within_bounds_and_serves_while_it_is_asked(
    phases: list[tuple[float, int]], low: int
) -> None:
    fleet = FakePool(PoolSettings(min=low, max=6, standby=0, parked=0))
    fleet.add(views(max(1, low)))
    for rate, seconds in phases:
        for _ in range(seconds):
            fleet.step(demand(rate * RATE))
            going = sum(each.target is ReplicaState.STOPPING for each in fleet.replicas.values())
            assert low <= len(fleet.replicas) - going <= 6
            if rate:
                assert fleet.num_active >= 1


def test_an_empty_observation_of_a_pool_that_may_be_empty_is_left_alone() -> None:
    assert decide(PoolSettings(min=0, standby=0, parked=0), PoolObservation("pool", Demand())).actions == ()
