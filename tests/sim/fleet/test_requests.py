"""Request by request and as a fluid, the same demand comes to the same: under a plan, and with policies in the loop."""

from collections.abc import Callable
from functools import partial

import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Durations
from penstock.fleet.settings import PoolSettings
from penstock.sim.cost import StepCost
from penstock.sim.fleet.compare import Case, make_policy
from penstock.sim.fleet.demand import Window, draw
from penstock.sim.fleet.fluid import run_fluid
from penstock.sim.fleet.oracle import Oracle, best_plan
from penstock.sim.fleet.policy import Autoscaler
from penstock.sim.fleet.requests import run_requests
from penstock.sim.fleet.result import FleetResult
from penstock.sim.fleet.serving import Serving
from penstock.sim.profile import Profile

pytestmark = pytest.mark.slow

SLO = Slo(ttft_s=2.0, tpot_s=0.2)
SLOW = Profile(
    "slow",
    StepCost(step_s=5e-3, weights_s=20e-3, token_s=200e-6, sequence_s=50e-6),
    kv_tokens=200_000,
    max_sequences=64,
    chunk_tokens=2048,
    slo=SLO,
)
DURATIONS = Durations(start_s=20.0)
RATES = [4.0] * 2 + [14.0] * 2 + [4.0] * 4
CURVE = draw("hill", [Window(60, rate, 2.0, 500, 20) for rate in RATES], seed=5)
CASE = Case(CURVE, SLOW, SLO, PoolSettings(min=1, max=10), DURATIONS, target=0.99)


def both_ways(make: Callable[[], Autoscaler], num_active: int) -> tuple[FleetResult, FleetResult]:
    """As a fluid, and request by request."""
    fluid, single = (
        run(CURVE, make(), SLOW, SLO, DURATIONS, num_active=num_active) for run in (run_fluid, run_requests)
    )
    assert single.requests == fluid.requests
    assert single.replica_hours == pytest.approx(fluid.replica_hours, rel=0.1)
    assert single.in_slo == pytest.approx(fluid.in_slo, abs=0.05)
    return fluid, single


def test_both_ways_agree_under_the_same_decisions() -> None:
    plan = best_plan(CURVE, partial(Serving, SLOW, SLO), DURATIONS, CASE.target, CASE.settings.min)
    fluid, single = both_ways(lambda: Oracle(plan, CURVE.begins_at), int(plan.starts[0]))
    assert single.decisions == fluid.decisions > 0


@pytest.mark.parametrize("name", ["ours", "hpa"])
def test_both_ways_agree_with_a_policy_in_the_loop(name: str) -> None:
    fluid, single = both_ways(lambda: make_policy(name, CASE), 2)
    assert fluid.decisions > 0
    assert single.decisions > 0
