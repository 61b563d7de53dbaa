"""The fluid model: capacity is the simulator's, every policy can be run, and the oracle is the cheapest that keeps."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind
from penstock.fleet.policy.observation import Durations, ReplicaState
from penstock.fleet.settings import PoolSettings
from penstock.sim.fleet.compare import POLICIES, Case, compare
from penstock.sim.fleet.demand import Window, draw
from penstock.sim.fleet.oracle import needed_levels, plan_levels
from penstock.sim.fleet.page import page
from penstock.sim.fleet.replicas import PoolReplicas
from penstock.sim.fleet.result import share_taken_back
from penstock.sim.fleet.serving import Serving
from penstock.sim.fleet.table import markdown
from penstock.sim.profile import load_profile

SLO = Slo(ttft_s=1.0, tpot_s=0.05)
PROFILE = replace(load_profile("h200-llama8b"), slo=SLO)


def kept(rate: float, num_active: int = 2, seconds: int = 60) -> float:
    serving = Serving(PROFILE, SLO)
    return sum(serving.tick(rate, 930, 141, num_active).in_slo for _ in range(seconds)) / (rate * seconds)


def test_a_pool_keeps_its_slo_up_to_its_rate_and_not_beyond() -> None:
    rate = 2 * Serving(PROFILE, SLO).work(930, 141).rate
    assert kept(0.95 * rate) == pytest.approx(1.0)
    assert kept(1.1 * rate) < 0.6


def test_a_prompt_that_takes_longer_than_the_ttft_by_itself_breaks_it_on_an_idle_pool() -> None:
    cost = replace(PROFILE.cost, token_s=4e-4)
    serving = Serving(replace(PROFILE, chunk_tokens=512, cost=cost), Slo(ttft_s=1.0, tpot_s=5.0))
    for _ in range(60):
        tick = serving.tick(0.1, 1000, 100, 10)
    # Prompts of more than 2,400 tokens or so: one in eleven, of an exponential distribution.
    assert tick.in_slo / 0.1 == pytest.approx(0.91, abs=0.02)
    assert tick.ttft_s < 1.0 < tick.ttft_s + tick.rest_p95_s


def test_places_bound_the_rate_of_long_outputs() -> None:
    work = Serving(PROFILE, SLO).work
    assert work(350, 300).rate == pytest.approx(43, rel=0.05)  # of the simulator: 41 to 45
    assert work(740, 45).rate == pytest.approx(50, rel=0.05)  # 49 to 52


def test_a_burst_within_the_objective_is_served_in_time() -> None:
    serving = Serving(PROFILE, SLO)
    assert serving.tick(50, 930, 141, 2).in_slo == 50
    assert serving.tick(1000, 930, 141, 2).in_slo < 200


def test_requests_wait_while_no_replica_is_active() -> None:
    serving = Serving(PROFILE, SLO)
    assert serving.tick(5, 930, 141, 0).in_slo == 0
    assert serving.queued == 5
    for _ in range(3):
        serving.tick(0, 930, 141, 1)
    assert serving.queued == 0


def test_states_take_their_time() -> None:
    durations = Durations(start_s=60.0, wake_s=2.0, activate_s=0.1, park_s=3.0)
    pool = PoolReplicas(durations, 1, drains=lambda _: 5.0)

    def state(number: int, at: float) -> ReplicaState | None:
        pool.advance(at)
        return next((each.state for each in pool.views if each.id == f"r{number}"), None)

    pool.act([Action(ActionKind.START, ""), Action(ActionKind.START, "", to=ReplicaState.STANDBY)], 0.0)
    assert state(2, 59.0) is ReplicaState.STARTING
    assert state(2, 60.2) is ReplicaState.ACTIVE
    assert state(3, 61.0) is ReplicaState.STANDBY
    pool.act([Action(ActionKind.PARK, "", "r1"), Action(ActionKind.ACTIVATE, "", "r3")], 70.0)
    assert state(1, 74.0) is ReplicaState.DRAINING
    assert state(3, 74.0) is ReplicaState.ACTIVE
    assert state(1, 77.0) is ReplicaState.PARKING
    assert state(1, 79.0) is ReplicaState.PARKED
    pool.act([Action(ActionKind.WAKE, "", "r1"), Action(ActionKind.STOP, "", "r2")], 80.0)
    assert state(1, 82.2) is ReplicaState.ACTIVE
    assert state(2, 90.0) is None
    assert pool.states == [(ReplicaState.ACTIVE, 2)]


def test_a_change_is_taken_back_by_the_opposite_within_five_minutes() -> None:
    assert share_taken_back([(0, 1), (100, 2), (350, -1), (2000, -1), (2301, 1)]) == 0.2
    assert share_taken_back([]) == 0.0


def test_the_oracle_keeps_a_replica_over_short_gaps_and_leaves_out_what_is_not_worth_it() -> None:
    needed = np.array([2] * 50 + [1] * 50 + [2] * 50 + [1] * 400 + [2] * 50 + [1] * 50 + [3] + [1] * 100)
    arrivals = np.full(len(needed), 10)
    levels = needed_levels(needed, arrivals, least=1)
    plan = plan_levels(levels, len(needed), start_s=60.0, price_s=1.0, least=1)
    assert plan.active.tolist()[:150] == [2] * 150  # begun once: the gap is shorter than a start
    assert plan.active[200] == 1
    assert plan.active[560] == 2
    assert plan.active.max() == 2  # one second of a third replica is not worth a start
    assert plan.starts[550 - 61] == 1  # before it is needed
    assert plan.replica_seconds == plan.active.sum() + 61
    dear = plan_levels(levels, len(needed), start_s=60.0, price_s=1000.0, least=1)
    assert (dear.active >= needed).all()


def test_every_policy_runs_and_the_oracle_costs_least_of_those_that_keep_the_slo() -> None:
    rates = [60.0] * 10 + [180.0] * 15 + [60.0] * 20
    windows = [Window(60, rate, 2.0, 930, 141) for rate in rates]
    settings = PoolSettings(min=1, max=20)
    case = Case(draw("hill", windows, seed=5), PROFILE, SLO, settings, Durations(), target=0.99)
    results = {each.policy: each for each in compare(case, POLICIES)}
    oracle = results["oracle"]
    assert oracle.in_slo >= 0.99
    assert oracle.over_oracle == 1.0
    for each in results.values():
        assert each.requests == case.curve.arrivals.sum()
        assert sum(each.hours.values()) == pytest.approx(each.replica_hours + each.parked_hours)
        assert each.in_slo < 0.99 or each.replica_hours >= oracle.replica_hours * 0.999
    assert results["static"].in_slo > 0.99
    assert results["static"].most_active == 7
    assert "ours" in markdown(list(results.values()))
    assert "Replicas by state" in page(list(results.values()), title="hill")
