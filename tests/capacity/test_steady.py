"""The closed forms against an engine that is run step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.demand import Demand, Target
from penstock.capacity.formats import Formats
from penstock.capacity.hardware import hardware
from penstock.capacity.shapes import SHAPES
from penstock.capacity.steady import Engine, Limits
from penstock.capacity.step_cost import StepCost
from penstock.workload.lengths import Lengths
from tests.capacity.one_engine import serve

H200 = hardware()["h200"]
LIMITS = Limits(kv_tokens=10**7)
FIXED = ((512, 256),)


def sample(prompt: str, output: str) -> tuple[tuple[int, int], ...]:
    source = random.Random(0)
    prompts, outputs = Lengths.parse(prompt), Lengths.parse(output)
    return tuple((prompts.draw(source), outputs.draw(source)) for _ in range(500))


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [("llama8b", FIXED), ("llama70b", FIXED), ("llama8b", sample("lognormal:1000:1200", "lognormal:200:150"))],
    ids=["8B", "70B", "8B of many lengths"],
)
def test_latency_is_what_an_engine_shows(shape: str, lengths: tuple[tuple[int, int], ...], load: float) -> None:
    formats = Formats("fp8" if shape == "llama70b" else "bfloat16")
    cost = StepCost(SHAPES[shape], H200, formats=formats)
    demand = Demand(1.0, lengths, target=Target(2.0, 0.2))
    engine = Engine(cost, demand.profile, LIMITS, demand.target)
    rate = engine.max_rate()[0] * load
    told = engine.expected(rate)
    served = serve(cost, replace(demand, rate=rate), LIMITS, num_requests=1500)[150:]
    ttfts = [each.ttft_s for each in served]
    tpots = [each.tpot_s for each in served if each.output > 20]
    assert told.tpot_p50_s is not None
    assert told.tpot_p_s is not None
    assert told.ttft_p_s == pytest.approx(quantile(ttfts, 0.95), rel=0.2)
    assert told.ttft_p50_s == pytest.approx(quantile(ttfts, 0.5), rel=0.5)  # a whole step is waited for: too long
    assert told.tpot_p50_s == pytest.approx(quantile(tpots, 0.5), rel=0.2)
    assert told.tpot_p_s == pytest.approx(quantile(tpots, 0.95), rel=0.2)


def test_a_prompt_waits_for_the_weights_with_each_of_its_chunks() -> None:
    demand, cost = Demand(1.0, ((1024, 256),)), StepCost(SHAPES["llama8b"], H200)
    whole, halves = (
        Engine(cost, demand.profile, Limits(10**7, chunk_tokens=tokens), demand.target).expected(1e-9).ttft_p50_s
        for tokens in (1024, 512)
    )
    assert halves - whole == pytest.approx(cost.fixed_s + cost.read_s, rel=1e-3)


rates = st.floats(1e-3, 1e3)
targets = st.builds(Target, st.none() | st.floats(0.05, 5), st.none() | st.floats(0.005, 0.5))


@given(rate=rates, more=st.floats(1, 3), target=targets)
def test_more_load_is_never_faster(rate: float, more: float, target: Target) -> None:
    demand = Demand(1.0, FIXED, target=target)
    engine = Engine(StepCost(SHAPES["llama8b"], H200), demand.profile, LIMITS, target)
    few, many = engine.expected(rate), engine.expected(rate * more)
    assert many.ttft_p_s >= few.ttft_p_s
    assert many.tpot_p_s is not None
    assert few.tpot_p_s is not None
    assert many.tpot_p_s >= few.tpot_p_s


@given(target=targets, factor=st.floats(1, 10))
def test_a_looser_target_never_carries_less(target: Target, factor: float) -> None:
    def carried(each: Target) -> float:
        demand = Demand(1.0, FIXED, target=each)
        return Engine(StepCost(SHAPES["llama8b"], H200), demand.profile, LIMITS, each).max_rate()[0]

    looser = replace(target, ttft_s=target.ttft_s and target.ttft_s * factor)
    assert carried(looser) >= carried(target) * (1 - 1e-6)


def test_what_stands_against_more_is_named() -> None:
    def bound(target: Target, limits: Limits = LIMITS) -> str:
        demand = Demand(1.0, FIXED, target=target)
        return Engine(StepCost(SHAPES["llama8b"], H200), demand.profile, limits, target).max_rate()[1]

    assert bound(Target(0.04, None)) == "ttft"
    assert bound(Target(None, 0.008)) == "tpot"
    assert bound(Target(None, None)) == "utilisation"
    assert bound(Target(None, None), Limits(20_000)) == "kv memory"
    assert bound(Target(None, None), Limits(10**7, max_num_seqs=16)) == "sequences"
    assert bound(Target(1e-3, None)) == "ttft"
