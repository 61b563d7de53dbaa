from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.demand import Demand, Target
from penstock.capacity.hardware import hardware
from penstock.capacity.shapes import SHAPES
from penstock.capacity.steady import Engine, Limits
from penstock.capacity.step_cost import PENSTOCK, StepCost
from penstock.core.slo import Slo
from penstock.fleet.policy.profile import CapacityProfile, Mix, ReplicaCosts, ReplicaReport
from tests.fleet.policy.fake_pool import COSTS, MIX, SLO

REPORT = ReplicaReport(50_000.0, ((1, 5.1e-3), (16, 6.6e-3), (64, 11.4e-3)), 500_000, 128, 4096)


def test_a_shape_serves_what_the_plan_says() -> None:
    cost, limits = StepCost(SHAPES["llama8b"], hardware()["h200"], PENSTOCK), Limits(600_000)
    profile = CapacityProfile(ReplicaCosts.from_step_cost(cost, limits))
    demand = Demand(1.0, ((500, 200),), target=Target(SLO.ttft_s, SLO.tpot_s))
    planned = Engine(cost, demand.profile, limits, demand.target).max_rate()[0]
    assert profile.max_rate(Mix(500, 200), SLO) == pytest.approx(planned, rel=0.1)


def test_what_is_predicted_at_the_most_is_within_the_slo() -> None:
    profile = CapacityProfile(COSTS)
    told = profile.predict(MIX, SLO, profile.max_rate(MIX, SLO) * 0.98)
    assert told.ttft_p_s <= SLO.ttft_s
    assert SLO.tpot_s is not None
    assert told.tpot_p_s <= SLO.tpot_s
    assert told.kv_usage <= 1


@given(prompt=st.floats(10, 4000), output=st.floats(1, 1000), share=st.floats(0, 0.9), longer=st.floats(1.1, 3))
def test_longer_requests_and_slower_replicas_serve_fewer(
    prompt: float, output: float, share: float, longer: float
) -> None:
    profile = CapacityProfile(COSTS)
    rate = profile.max_rate(Mix(prompt, output, share), SLO)
    assert rate > 0
    assert profile.max_rate(Mix(prompt * longer, output * longer, share), SLO) <= rate
    assert profile.max_rate(Mix(prompt, output, share), SLO, slowdown=longer) <= rate


def test_a_cache_that_holds_prompts_serves_more() -> None:
    profile = CapacityProfile(COSTS)
    assert profile.max_rate(Mix(2000, 100, 0.8), SLO) > 1.5 * profile.max_rate(Mix(2000, 100, 0.0), SLO)


def test_reports_are_learned_and_one_odd_one_changes_nothing() -> None:
    learned = ReplicaCosts.from_reports([REPORT] * 3)
    odd = ReplicaReport(1.0, ((1, 100.0),), 1, 1, 1)
    assert learned is not None
    assert ReplicaCosts.from_reports([REPORT, odd, REPORT]) == learned
    assert learned.fixed_s + learned.read_s == pytest.approx(5e-3, rel=0.05)
    assert learned.sequence_s == pytest.approx(1e-4, rel=0.05)
    assert (learned.kv_tokens, learned.max_num_seqs, learned.chunk_tokens) == (500_000, 128, 4096)


def test_nobody_has_reported_yet() -> None:
    assert ReplicaCosts.from_reports([]) is None
    assert ReplicaCosts.from_reports([ReplicaReport()]) is None


def test_costs_are_kept_as_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(COSTS), type=ReplicaCosts) == COSTS


def test_another_slo_is_answered_anew() -> None:
    profile = CapacityProfile(COSTS)
    strict = replace(SLO, tpot_s=0.006)
    wide, narrow = profile.max_rate(MIX, SLO), profile.max_rate(MIX, strict)
    assert narrow < wide == profile.max_rate(MIX, SLO)


def test_an_slo_that_an_idle_replica_breaks_is_served_within_reason() -> None:
    assert CapacityProfile(COSTS).max_rate(MIX, Slo(ttft_s=1e-4, tpot_s=1e-5)) > 0
