"""Request by request and as a fluid, the same demand under the same policy comes to the same."""

import pytest

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Durations
from penstock.fleet.settings import PoolSettings
from penstock.sim.cost import StepCost
from penstock.sim.fleet.compare import Case, make_policy
from penstock.sim.fleet.demand import Window, draw
from penstock.sim.fleet.fluid import run_fluid
from penstock.sim.fleet.requests import run_requests
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


def test_both_ways_agree_in_replica_hours_and_slo_share() -> None:
    rates = [4.0] * 2 + [14.0] * 2 + [4.0] * 4
    curve = draw("hill", [Window(60, rate, 2.0, 500, 20) for rate in rates], seed=5)
    durations = Durations(start_s=20.0)
    settings = PoolSettings(min=1, max=8, down_cooldown_s=60.0)
    case = Case(curve, SLOW, SLO, settings, durations)
    fluid, single = (
        run(curve, make_policy("ours", case), SLOW, SLO, durations, num_active=2) for run in (run_fluid, run_requests)
    )
    assert single.requests == fluid.requests
    assert single.replica_hours == pytest.approx(fluid.replica_hours, rel=0.1)
    assert single.in_slo == pytest.approx(fluid.in_slo, abs=0.1)
    assert single.decisions > 0
