"""Profiles of replicas that nobody has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.demand import Demand
from penstock.capacity.hardware import hardware
from penstock.capacity.plan import Case, Setup, engine_of
from penstock.capacity.shapes import SHAPES
from penstock.capacity.step_cost import PENSTOCK, StepCost
from penstock.core.errors import ConfigError
from penstock.core.parallelism import Parallelism
from penstock.engine.step_log import StepShape
from penstock.sim.flight import Ask
from penstock.sim.predicted import predicted_profile
from penstock.sim.profile import Profile, read_profile, write_profile
from penstock.sim.simulation import Simulation

TABLE = hardware()
RANDOM = Demand(1.0, ((512, 256),))
LAYOUTS = [Parallelism(), Parallelism(2), Parallelism(8), Parallelism(4, 2), Parallelism(4, 4), Parallelism(16)]


def predicted(shape: str, parallelism: Parallelism) -> Profile:
    case = Case(SHAPES[shape], RANDOM, TABLE, engine="penstock")
    return predicted_profile(shape, case, Setup("h200"), parallelism)


shapes = st.builds(
    StepShape, st.integers(0, 8192), st.integers(0, 10**7), st.integers(0, 256), st.integers(0, 10**6), st.just(0)
)


@given(shapes, st.sampled_from(["llama8b", "mixtral-8x7b"]), st.sampled_from(LAYOUTS))
def test_a_step_takes_as_long_as_the_plan_says(step: StepShape, shape: str, parallelism: Parallelism) -> None:
    """Also after its profile was written to a file and read again."""
    plan = StepCost(SHAPES[shape], TABLE["h200"], PENSTOCK, parallelism=parallelism)
    profile = predicted(shape, parallelism)
    assert profile.cost.seconds(step) == plan.seconds(*step[:4])
    again = read_profile(write_profile(profile), where="a file")
    assert again == profile
    assert (again.devices, again.stages) == (parallelism.num_ranks, parallelism.pp)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"llama70b in bf16, KV bf16 does not fit on 1 x h200"):
        predicted("llama70b", Parallelism())


@pytest.mark.parametrize("parallelism", [Parallelism(2), Parallelism(2, 2)])
def test_the_simulator_and_the_plan_agree_on_time_per_token(parallelism: Parallelism) -> None:
    """Requests that come evenly, at a third of what a replica carries."""
    case = Case(SHAPES["llama70b"], RANDOM, TABLE, engine="penstock")
    engine = engine_of(case, Setup("h200"), parallelism)
    rate = engine.max_rate()[0] / 3
    said = engine.expected(rate).tpot_p50_s
    assert said is not None
    profile = replace(
        predicted("llama70b", parallelism), slo=replace(predicted("llama8b", Parallelism()).slo, tpot_s=1.0)
    )
    every_s = 1 / (rate * parallelism.pp)
    asks = [Ask(number * every_s, 512, 256) for number in range(60)]
    result = Simulation(profile, 1).run(asks)
    assert result.tpot_s.p50 == pytest.approx(said, rel=0.25)
    assert result.device_hours == pytest.approx(parallelism.num_ranks * result.seconds / 3600)
