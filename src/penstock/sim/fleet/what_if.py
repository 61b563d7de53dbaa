"""A pool's recorded demand under other settings: what each alternative would have cost, and how many it would have
served within the SLO, by the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from msgspec import Struct, field

from penstock.core.errors import ConfigError
from penstock.fleet.alternatives import Alternative
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.observation import CapacityType, Durations, Offer
from penstock.fleet.policy.profile import ReplicaCosts
from penstock.fleet.rounds import PolicyRound
from penstock.fleet.settings import PoolSettings
from penstock.sim.cost import StepCost
from penstock.sim.fleet.compare import Case, make_policy
from penstock.sim.fleet.demand import DemandCurve
from penstock.sim.fleet.fluid import run_fluid
from penstock.sim.fleet.result import FleetResult, Prices
from penstock.sim.profile import Profile
from penstock.tenancy.fleet import FleetSample

RECORDED = "as recorded"
_MAX_DISPERSION = 30.0


class Outcome(Struct, frozen=True):
    """The outcome of a pool over the recorded time. Hours are of replicas."""

    name: str
    replica_hours: float  # in every state that occupies a device
    hours: dict[str, float]  # by state
    cost: float
    in_slo: float | None  # share of requests; None: none came
    shed: float  # share of requests
    decisions: int  # that made the pool larger or smaller
    most_active: int
    spot_hours: float | None = None  # of `replica_hours`; None: not recorded


class WhatIf(Struct, frozen=True):
    pool: str
    begins_at: float
    ends_at: float
    requests: int
    alternatives: list[Outcome]
    notes: list[str] = field(default_factory=list)  # what the answer cannot know


def recorded_outcome(samples: Sequence[FleetSample], decisions: Sequence[Decision]) -> Outcome:
    """`decisions`: oldest first."""
    hours: dict[str, float] = {}
    for sample in samples:
        for state, seconds in sample.seconds.items():
            hours[state] = hours.get(state, 0.0) + seconds / 3600
    kept, missed = sum(each.in_slo for each in samples), sum(each.out_of_slo for each in samples)
    requests, refused = sum(each.arrivals or 0 for each in samples), sum(each.refused for each in samples)
    return Outcome(
        RECORDED,
        sum(hours.values()) - hours.get("parked", 0.0),
        hours,
        sum(each.cost for each in samples),
        kept / (kept + missed + refused) if kept + missed + refused else None,
        refused / requests if requests else 0.0,
        sum(one.wanted != other.wanted for one, other in pairwise(decisions)),
        max((each.states.get("active", 0) for each in samples), default=0),
    )


def simulate(
    curve: DemandCurve,
    alternative: Alternative,
    costs: ReplicaCosts,
    durations: Durations,
    *,
    num_active: int,
    policy: str = "ours",
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """`costs`: of a replica as it was. `num_active`: replicas at the beginning, as far as the bounds let."""
    settings, slo = alternative.settings, alternative.slo
    profile = replica_profile(costs.scaled(1 / alternative.speed), slo=slo)
    found = run_fluid(
        curve,
        make_policy(policy, Case(curve, profile, slo, settings, durations)),
        profile,
        slo,
        durations,
        num_active=min(settings.max, max(settings.min, num_active)),
        prices=Prices(settings.price_per_hour, settings.parked_price_per_hour or 0.0, settings.spot.price_per_hour),
        offers=offers_of(settings),
        progress=progress,
    )
    return _outcome(alternative.name, found)


def _outcome(name: str, found: FleetResult) -> Outcome:
    return Outcome(
        name,
        found.replica_hours,
        found.hours,
        found.cost,
        found.in_slo if found.requests else None,
        found.shed,
        found.decisions,
        found.most_active,
        found.spot_hours,
    )


def offers_of(settings: PoolSettings) -> tuple[Offer, ...]:
    """Capacity that is always there, at the pool's prices, the cheapest first."""
    prices = {CapacityType.ON_DEMAND: settings.price_per_hour}
    if settings.spot.share > 0:
        prices[CapacityType.SPOT] = settings.spot.price_per_hour
    ordered: Mapping[CapacityType, float] = dict(sorted(prices.items(), key=lambda item: item[1]))
    return tuple(Offer(zone, kind, price) for kind, price in ordered.items() for zone in settings.zones or [""])


def replica_profile(costs: ReplicaCosts, **more: object) -> Profile:
    """Returns the costs that replicas reported of themselves as a profile of the simulator."""
    cost = StepCost(
        step_s=costs.fixed_s,
        weights_s=costs.read_s,
        token_s=costs.linear_token_s,
        pair_s=costs.pair_s,
        context_s=costs.kv_token_s,
        sequence_s=costs.sequence_s,
        head_s=costs.head_token_s,
        exchange_s=costs.token_s,
    )
    profile = Profile("recorded", cost, costs.kv_tokens, costs.max_num_seqs, costs.chunk_tokens)
    return replace(profile, **more)  # type: ignore[arg-type]


def measured_costs(rounds: Sequence[PolicyRound]) -> ReplicaCosts:
    """Speed of a replica in the median round, as replicas told it and as the policy had corrected it."""
    known = [each.costs.scaled(each.memory.slowdown) for each in rounds if each.costs is not None]
    if not known:
        raise ConfigError("no replica of this pool has told how fast it is; ask it something first", param="pool")
    return sorted(known, key=lambda costs: costs.linear_token_s)[len(known) // 2]


def measured_dispersion(rounds: Sequence[PolicyRound]) -> float:
    """Variance of the arrivals of a second over their mean, in the median round that had any; at least Poisson's."""
    found = [each.memory.dispersion for each in rounds if each.memory.rate > 0]
    return min(_MAX_DISPERSION, max(1.0, median(found))) if found else 1.0
