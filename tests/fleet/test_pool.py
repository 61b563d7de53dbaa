"""A pool as gateways are told of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.api.replica_report import ReplicaReport
from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import ReplicaState
from penstock.fleet.pool import Pool
from penstock.fleet.settings import PoolSettings
from penstock.tenancy.fleet import FleetReplica


def eta_s(state: ReplicaState, passed_s: float, target: ReplicaState = ReplicaState.ACTIVE) -> float | None:
    pool = Pool("p", PoolSettings(), Slo())
    for _ in range(3):
        pool.durations.add("start_s", 60.0)
    row = FleetReplica("r", "p", state, 1000.0, target=target, created_at=1000.0)
    return pool.status(Decision("p", 1000.0, 1), [row], 1000.0 + passed_s).eta_s


def test_eta_is_what_is_left_of_the_usual_start() -> None:
    assert eta_s(ReplicaState.STARTING, 20.0) == pytest.approx(40.0)


def test_eta_of_an_overdue_start_grows() -> None:
    assert eta_s(ReplicaState.STARTING, 120.0) == pytest.approx(30.0)
    assert eta_s(ReplicaState.STARTING, 240.0) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("state", "target"),
    [(ReplicaState.STARTING, ReplicaState.STANDBY), (ReplicaState.ACTIVE, ReplicaState.ACTIVE)],
)
def test_replica_that_is_not_on_its_way_has_no_eta(state: ReplicaState, target: ReplicaState) -> None:
    assert eta_s(state, 1.0, target) is None


def test_number_that_was_wanted_long_ago_is_forgotten() -> None:
    pool = Pool("p", PoolSettings(min=0, down_cooldown_s=300.0), Slo())
    kept = {"policy": '{"wanted":3,"at":1000.0,"caution":0.7}'}
    pool.restore(kept, 1200.0)
    assert (pool._memory.wanted, pool._memory.caution) == (3, 0.7)
    pool.restore(kept, 1400.0)
    assert (pool._memory.wanted, pool._memory.caution) == (None, 0.7)


@pytest.mark.parametrize("can_park", [True, False])
def test_replicas_that_cannot_be_parked_are_not_planned_to_be(can_park: bool) -> None:
    pool = Pool("p", PoolSettings(surge=3.0, max=9), Slo())
    row = FleetReplica(
        "r", "p", ReplicaState.ACTIVE, 1000.0, url="http://127.0.0.1:1", created_at=900.0, ready_at=950.0
    )
    pool.observation([row], {"r": ReplicaReport("boot", "p", "starting")}, 999.0)  # it cannot say yet
    assert pool._policy.settings.parked is None
    report = ReplicaReport("boot", "p", "ready", can_park=can_park)
    pool.observation([row], {"r": report}, 1000.0)
    assert pool._policy.settings.parked == (None if can_park else 0)


def test_replica_has_the_price_of_its_state() -> None:
    pool = Pool("p", PoolSettings(price_per_hour=3.0, parked_price_per_hour=0.5), Slo())
    row = pool.new_replica(Action(ActionKind.START, "demand"), 1000.0)
    assert row.price_per_hour == 3.0
    parked = pool.priced(replace(row, state=ReplicaState.PARKED))
    assert parked.price_per_hour == 0.5
    assert pool.status(Decision("p", 1000.0, 1), [parked], 1000.0).cost_per_hour == 0.5
    assert pool.priced(replace(parked, state=ReplicaState.WAKING)).price_per_hour == 3.0
