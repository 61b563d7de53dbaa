"""A pool's status and history: what gateways, the console and `penstock fleet` show of it."""

from __future__ import annotations

import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.pool import Pool
from penstock.fleet.settings import PoolSettings
from penstock.tenancy.fleet import FleetReplica, PoolDemand


def pool() -> Pool:
    return Pool("p", PoolSettings(model="smollm2", price_per_hour=3.6), Slo())


def replica(state: str, at: float, name: str = "a") -> FleetReplica:
    return FleetReplica(name, "p", state, at, price_per_hour=3.6, created_at=at)


def test_status_tells_of_starts_failures_and_cost() -> None:
    found = pool()
    found.start_failed(10.0, "no such model")
    found.start_failed(20.0, "no such model")
    status = found.status(Decision("p", 100.0, 1, bound="max"), [replica("starting", 60.0)], 100.0)
    assert (status.start_failures, status.failure, status.counts) == (2, "no such model", {"failed_start": 2})
    assert (status.oldest_start_s, status.bound, status.cost_per_hour) == (40.0, "max", 3.6)
    assert status.durations["start_s"] > 0
    found.start_succeeded()
    assert found.status(Decision("p", 101.0, 1), [], 101.0).start_failures == 0


def test_reason_of_the_last_change_stays() -> None:
    found = pool()
    observation = found.observation([], {}, 0.0)
    first = found.decide(observation, 0.0)
    assert [action.kind for action in first.actions] == [ActionKind.START]
    found._reason = "a surge"
    assert found.status(Decision("p", 1.0, 1), [], 1.0).reason == "a surge"


def test_sample_has_the_cost_and_the_tokens_since_the_one_before() -> None:
    found = pool()
    decision = Decision("p", 0.0, 1, actions=(Action(ActionKind.START, "wanted"),))
    for second in (0.0, 30.0, 60.0):
        row = PoolDemand("g", "p", second, arrivals=int(second), prompt_tokens=int(10 * second), output_tokens=5)
        found.observe_demand([row], second)
        found.status(decision, [replica("active", 0.0), replica("standby", 30.0, "b")], second)
    sample = found.sample(decision, [replica("active", 0.0)], 60.0)
    assert sample.seconds == {"active": 60.0, "standby": 30.0}
    assert sample.cost == pytest.approx(0.09)
    assert sample.costs == {"active": pytest.approx(0.06), "standby": pytest.approx(0.03)}
    assert sample.tokens == 600
    assert found.sample(decision, [], 61.0).cost == 0.0
