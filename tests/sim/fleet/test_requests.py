"""Request by request and as a fluid, the same demand under the same decisions comes to the same."""

from functools import partial

import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Durations
from penstock.sim.cost import StepCost
from penstock.sim.fleet.demand import Window, draw
from penstock.sim.fleet.fluid import run_fluid
from penstock.sim.fleet.oracle import Oracle, best_plan
from penstock.sim.fleet.requests import run_requests
from penstock.sim.fleet.serving import Serving
from penstock.sim.profile import Profile

SLO = Slo(ttft_s=2.0, tpot_s=0.2)
SLOW = Profile(
    "slow",
    StepCost(step_s=5e-3, weights_s=20e-3, token_s=200e-6, sequence_s=50e-6),
    kv_tokens=200_000,
    max_sequences=64,
    chunk_tokens=2048,
    slo=SLO,
)


def test_both_ways_agree_in_replica_hours_and_slo_share_under_the_same_decisions() -> None:
    rates = [4.0] * 2 + [14.0] * 2 + [4.0] * 4
    curve = draw("hill", [Window(60, rate, 2.0, 500, 20) for rate in rates], seed=5)
    durations = Durations(start_s=20.0)
    plan = best_plan(curve, partial(Serving, SLOW, SLO), durations, 0.99, 1)
    fluid, single = (
        run(curve, Oracle(plan, curve.begins_at), SLOW, SLO, durations, num_active=int(plan.starts[0]))
        for run in (run_fluid, run_requests)
    )
    assert single.requests == fluid.requests
    assert single.decisions == fluid.decisions > 0
    assert single.replica_hours == pytest.approx(fluid.replica_hours, rel=0.1)
    assert single.in_slo == pytest.approx(fluid.in_slo, abs=0.1)
