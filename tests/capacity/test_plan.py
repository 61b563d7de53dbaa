from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capacity.demand import Demand, Target
from penstock.capacity.formats import Formats
from penstock.capacity.hardware import hardware
from penstock.capacity.plan import Case, Layout, Setup, best, cheapest, layouts
from penstock.capacity.shapes import SHAPES
from penstock.core.parallelism import Parallelism
from tests.examples import examples

TABLE = hardware()
CHAT = Demand(100.0, ((512, 256),), target=Target(0.5, 0.1))


def case(shape: str = "llama8b", **demand: object) -> Case:
    return Case(SHAPES[shape], replace(CHAT, **demand), TABLE)  # type: ignore[arg-type]


def cost(found: Layout | None) -> float:
    return found.cost_per_month if found else float("inf")


def test_seventy_billion_at_a_thousand_a_second_within_200_ms() -> None:
    asked = case("llama70b", rate=1000.0, target=Target(0.2, 0.1))
    found = cheapest(asked, Setup("h200"), asked.hardware)
    assert found is not None
    assert found.expected is not None
    assert found.expected.ttft_p_s <= 0.2
    assert found.expected.tpot_p_s is not None
    assert found.expected.tpot_p_s <= 0.1
    assert found.num_replicas * found.rate_per_replica >= 1000
    assert found.memory.weight_bytes + found.memory.step_bytes + found.memory.kv_bytes <= 0.9 * 178 * 2**30
    price = TABLE[found.setup.gpu].price_per_hour
    assert found.cost_per_month == pytest.approx(found.num_gpus * price * 730)


def test_the_smallest_that_fits_is_not_the_smallest_that_is_fast_enough() -> None:
    judged = layouts(case("llama70b", target=Target(0.09, 0.1)), Setup("h200", Formats("fp8")))
    one, two = judged[:2]
    assert (one.parallelism, two.parallelism) == (Parallelism(1), Parallelism(2))
    assert one.num_sequences > 0
    assert (one.is_possible, one.bound) == (False, "ttft")
    assert two.is_possible


def test_a_pipeline_takes_what_one_node_cannot_hold() -> None:
    found = best(case("llama405b", target=Target(2.0, 0.2)), Setup("h100"))
    assert found is not None
    assert found.parallelism.num_ranks > 8
    assert found.parallelism.pp > 1


def test_both_engines_are_planned_as_pipelines_where_memory_binds() -> None:
    small, large = (replace(case(shape), engine="penstock") for shape in ("llama8b", "llama405b"))
    assert [each.parallelism for each in layouts(small, Setup("h200"))] == [Parallelism(tp) for tp in (1, 2, 4, 8)]
    found = [each.parallelism for each in layouts(large, Setup("h200")) if each.alone]
    assert Parallelism(8) in found
    assert all(each.num_ranks >= 8 for each in found)
    assert any(each.alone for each in layouts(large, Setup("a100"))), "two nodes hold what one cannot"


def test_sequences_of_a_pipeline_are_those_of_all_its_micro_batches() -> None:
    asked = replace(case(target=Target(None, None)), max_num_seqs=8)
    one, two = (layouts(asked, Setup("h200", parallelism=Parallelism(pp=pp)))[0] for pp in (1, 2))
    assert (one.bound, two.bound) == ("sequences", "sequences")
    assert two.rate_per_replica < 1.2 * one.rate_per_replica


def test_tensor_parallelism_over_nodes_is_planned_where_it_is_asked_for() -> None:
    wide = Setup("h200", parallelism=Parallelism(16))
    (found,) = layouts(case("llama70b"), wide)
    assert found.alone is not None
    small = Case(SHAPES["llama70b"], CHAT, {"h200": replace(TABLE["h200"], per_node=3)})
    assert layouts(small, wide)[0].alone is not None, "eight nodes of two"


def test_widths_that_a_shape_cannot_be_split_over_are_not_planned() -> None:
    odd = replace(SHAPES["llama8b"], intermediate_size=14_338)
    judged = layouts(Case(odd, CHAT, TABLE, engine="penstock"), Setup("h200"))
    assert [each.parallelism.tp for each in judged] == [1, 2]


def test_experts_that_cannot_be_cut_are_shared_out_whole() -> None:
    mixture = SHAPES["mixtral-8x7b"]
    assert mixture.experts is not None
    odd = replace(mixture, experts=replace(mixture.experts, intermediate_size=14_337))
    judged = layouts(Case(odd, CHAT, TABLE, engine="penstock"), Setup("h200"))
    assert [each.parallelism.short for each in judged] == ["TP1", "TP2 EP2", "TP4 EP4", "TP8 EP8"]


def test_spare_replicas_are_added_and_paid_for() -> None:
    plain, spare = (best(replace(case(), num_spare=n), Setup("h200")) for n in (0, 2))
    assert plain is not None
    assert spare is not None
    assert spare.num_replicas == plain.num_replicas + 2
    assert spare.cost_per_month > plain.cost_per_month


def test_too_tight_a_target_is_kept_by_nobody() -> None:
    assert best(case("llama70b", target=Target(0.001, None)), Setup("h200")) is None


setups = st.builds(
    Setup,
    st.sampled_from(sorted(TABLE)),
    st.builds(Formats, st.sampled_from(["bfloat16", "fp8", "int8", "int4"]), st.sampled_from(["bfloat16", "fp8"])),
)
lengths = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 600)), min_size=1, max_size=4).map(tuple)
targets = st.builds(Target, st.none() | st.floats(0.1, 5), st.none() | st.floats(0.02, 0.5))
demands = st.builds(Demand, st.floats(0.01, 5000), lengths, st.floats(0, 0.9), targets)
cases = st.builds(Case, st.sampled_from([SHAPES["llama8b"], SHAPES["llama70b"]]), demands, st.just(TABLE))


@settings(max_examples=examples(20))
@given(case=cases, setup=setups, factor=st.floats(1, 20))
def test_more_load_never_needs_fewer_replicas_nor_costs_less(case: Case, setup: Setup, factor: float) -> None:
    more = replace(case, demand=replace(case.demand, rate=case.demand.rate * factor))
    for few, many in zip(layouts(case, setup), layouts(more, setup), strict=True):
        assert many.num_replicas >= few.num_replicas
        assert many.num_gpus >= few.num_gpus
    assert cost(best(more, setup)) >= cost(best(case, setup))


@settings(max_examples=examples(20))
@given(case=cases, setup=setups, factor=st.floats(1, 4))
def test_more_memory_never_fits_fewer_sequences_nor_costs_more(case: Case, setup: Setup, factor: float) -> None:
    gpu = TABLE[setup.gpu]
    larger = replace(case, hardware={**TABLE, setup.gpu: replace(gpu, memory_gib=gpu.memory_gib * factor)})
    for few, many in zip(
        *(layouts(each, replace(setup, parallelism=Parallelism(2))) for each in (case, larger)), strict=True
    ):
        assert many.num_sequences >= few.num_sequences
        assert cost(many) <= cost(few)


@settings(max_examples=examples(20))
@given(case=cases, setup=setups, factor=st.floats(1, 10))
def test_what_is_asked_less_of_never_costs_more(case: Case, setup: Setup, factor: float) -> None:
    before = cost(best(case, setup)) * (1 + 1e-9)
    target = case.demand.target
    later = replace(target, ttft_s=target.ttft_s and target.ttft_s * factor, tpot_s=None)
    assert cost(best(replace(case, demand=replace(case.demand, target=later)), setup)) <= before
    shared = replace(case.demand, prefix_share=case.demand.prefix_share + (1 - case.demand.prefix_share) / 2)
    assert cost(best(replace(case, demand=shared), setup)) <= before
    cheaper = {name: replace(gpu, price_per_hour=gpu.price_per_hour / factor) for name, gpu in TABLE.items()}
    assert cost(best(replace(case, hardware=cheaper), setup)) <= before
