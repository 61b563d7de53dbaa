"""What a shape can be split over: the same that `model.shard` and `hub.stored` will cut, told without loading it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.capacity.formats import Formats
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.rank_share import rank_config
from penstock.capacity.shapes import SHAPES
from penstock.capacity.splitting import split_obstacle, splits_over, told_obstacle
from penstock.core.errors import ModelUnsupported
from penstock.core.model_config import Experts, ModelConfig, StoredGroups
from penstock.core.parallelism import Parallelism
from penstock.hub.stored import GroupedTensor, Part, StoredTensor
from penstock.model.layers import kv_heads, query_heads
from penstock.model.shard import Axis, Shard
from tests.examples import examples

THREE_KEYS = replace(SHAPES["llama8b"], num_heads=15, num_kv_heads=3, intermediate_size=12_288)
SMALL = replace(SHAPES["tiny"], intermediate_size=96)


@st.composite
def shapes(draw: st.DrawFn) -> ModelConfig:
    keys, each = draw(st.integers(1, 10)), draw(st.integers(1, 6))
    experts = None
    if draw(st.booleans()):
        count = draw(st.integers(1, 9))
        shared, dense = draw(st.sampled_from([0, 24, 30])), draw(st.sampled_from([(), (0,), (0, 1)]))
        experts = Experts(
            count,
            draw(st.integers(1, count)),
            draw(st.integers(1, 8)) * 12,
            shared_intermediate_size=shared,
            dense_layers=dense,
        )
    return replace(
        SMALL,
        num_kv_heads=keys,
        num_heads=keys * each,
        head_dim=draw(st.sampled_from([8, 12, 16])),
        intermediate_size=draw(st.integers(1, 40)) * 4,
        experts=experts,
    )


groupings = st.none() | st.sampled_from([4, 8, 16]).map(StoredGroups)


def cut(axis: Axis, tp: int, groups: StoredGroups | None, sp: int = 1) -> None:
    """Inputs of a linear over all ranks, as loading cuts them; raises where it would."""
    for rank in range(tp):
        span = Shard(rank, tp, sp).span(axis, "it")
        if groups is None or axis.size % groups.size:
            continue
        scales = StoredTensor(np.zeros((1, axis.size // groups.size), np.float32), "F32")
        stored = GroupedTensor(np.zeros((1, axis.size), np.uint8), 8, scales)
        stored.part(Part(stored.shape, slice(0, 1), slice(span.start, span.stop)), "it")


def loaded(config: ModelConfig, parallelism: Parallelism, groups: StoredGroups | None) -> None:
    """All that the layers of `model` would cut; raises where it cannot be."""
    tp, sp, experts = parallelism.tp, parallelism.sp, config.experts
    if tp == 1:
        return
    for rank in range(tp):
        Shard(rank, tp, sp).span(kv_heads(config), "keys")
    cut(query_heads(config), tp, groups, sp)
    if any(not config.has_experts(layer) for layer in range(config.num_layers)):
        cut(Axis(config.intermediate_size), tp, groups)
    if experts is not None and parallelism.ep > 1:
        Shard(0, tp).span(Axis(experts.count, group=1), "experts")
    elif experts is not None:
        cut(Axis(experts.intermediate_size), tp, groups)
    if experts is not None and experts.shared_intermediate_size:
        cut(Axis(experts.shared_intermediate_size), tp, groups)


def inputs(config: ModelConfig) -> list[int]:
    """Of linears that are split by their inputs."""
    found = [config.num_heads * config.head_dim, config.intermediate_size]
    if (experts := config.experts) is not None:
        found += [experts.intermediate_size, experts.shared_intermediate_size]
    return found


@settings(max_examples=examples(60))
@given(config=shapes(), tp=st.integers(1, 12), sp=st.sampled_from([1, 2, 3, 4]), shares=st.booleans(), groups=groupings)
def test_what_is_refused_is_what_loading_would_refuse(
    config: ModelConfig, tp: int, sp: int, shares: bool, groups: StoredGroups | None
) -> None:
    assume(groups is None or not any(size % groups.size for size in inputs(config)))  # no file has parts of groups
    assume(tp % sp == 0)
    parallelism = Parallelism(tp=tp, ep=tp if shares and config.experts is not None else 1, sp=sp)
    obstacle = split_obstacle(config, parallelism, groups)
    with nullcontext() if obstacle is None else pytest.raises(ModelUnsupported):
        loaded(config, parallelism, groups)


@settings(max_examples=examples(30))
@given(config=shapes(), tp=st.integers(2, 12), groups=groupings)
def test_a_refusal_names_a_dimension_and_numbers_of_ranks_that_work(
    config: ModelConfig, tp: int, groups: StoredGroups | None
) -> None:
    told = told_obstacle(config, Parallelism(tp=tp), groups)
    assume(told is not None)
    assert told is not None
    assert re.search(r"(heads|intermediate size|layers|experts) .*cannot be (split|shared out)", told)
    if told.endswith("it needs one device, or a pipeline (pp)"):
        assert not any(splits_over(config, number, None, groups) for number in range(2, 17))
        return
    works = [int(number) for number in told.rpartition(": ")[2].split(",")]
    assert works[0] == 1
    for number in works:
        assert splits_over(config, number, None, groups) is not None


@settings(max_examples=examples(40))
@given(config=shapes(), tp=st.integers(1, 12), sp=st.sampled_from([1, 2, 3, 4]), shares=st.booleans())
def test_the_largest_rank_has_its_share_and_all_ranks_together_have_the_model(
    config: ModelConfig, tp: int, sp: int, shares: bool
) -> None:
    parallelism = Parallelism(tp=tp, ep=tp if shares and config.experts is not None else 1, sp=sp)
    assume(split_obstacle(config, parallelism) is None)
    own = rank_config(config, parallelism)
    spans = [Shard(rank, tp, sp).num_units(kv_heads(config), "keys") for rank in range(tp)]
    queries = [Shard(rank, tp, sp).num_units(query_heads(config), "queries") for rank in range(tp)]
    assert (own.num_kv_heads, own.num_heads) == (max(spans), max(queries))
    assert own.vocab_size == max(len(Shard(rank, tp).vocabulary(config.vocab_size)) for rank in range(tp))
    whole, part = (ModelBytes(each, Formats()).read_bytes for each in (config, own))
    router_bytes = 2 * config.num_layers * config.hidden_size * (config.experts.count if config.experts else 0)
    assert tp * part + router_bytes >= whole >= part


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (THREE_KEYS, 4, "3 heads of keys and values cannot be split over 4 ranks.*work: 1, 2, 3"),
        (THREE_KEYS, 6, "15 query heads cannot be split over 6 ranks"),
        (SHAPES["llama70b"], 3, "the MLP's intermediate size of 28,672 cannot be split over 3 ranks.*: 1, 2, 4, 7, 8"),
        (SHAPES["mixtral-8x7b"], 3, "the experts' intermediate size of 14,336"),
        (
            replace(SHAPES["llama8b"], num_heads=31, num_kv_heads=31, intermediate_size=10_007),
            2,
            "No number of ranks divides it",
        ),
    ],
)
def test_examples_of_shapes_are_refused_by_name(config: ModelConfig, tp: int, said: str) -> None:
    assert re.search(said, told_obstacle(config, Parallelism(tp=tp)) or "")


def test_heads_may_be_shared_out_unevenly_and_the_rank_with_most_counts() -> None:
    assert split_obstacle(THREE_KEYS, Parallelism(tp=2)) is None
    own = rank_config(THREE_KEYS, Parallelism(tp=2))
    assert (own.num_kv_heads, own.num_heads) == (2, 10)


def test_groups_of_a_quantized_model_stay_whole_and_ordered_ones_are_never_cut() -> None:
    """Llama-2-7B in groups of 128: 11,008 inputs of a down projection are 86 groups, 43 for each of two ranks."""
    config = replace(SHAPES["llama8b"], num_kv_heads=32, intermediate_size=11_008)
    assert split_obstacle(config, Parallelism(tp=2), StoredGroups(128)) is None
    told = told_obstacle(config, Parallelism(tp=4), StoredGroups(128))
    assert re.search("11,008 .* 4 ranks: 2,752 for each, and groups of 128 .*work: 1, 2$", told or "")
    heads = told_obstacle(config, Parallelism(tp=32), StoredGroups(256))
    assert re.search("32 query heads .*groups of 256", heads or "")
    ordered = told_obstacle(config, Parallelism(tp=2), StoredGroups(128, is_ordered=True))
    assert re.search("act-order.*it needs one device", ordered or "")


def test_experts_are_cut_where_they_can_be_and_else_shared_out() -> None:
    """Qwen3-30B-A3B: a quarter of an expert's 768 inputs are 192, one group of 128 and a half."""
    mixture = SHAPES["qwen3-30b-a3b"]
    assert splits_over(mixture, 4) == Parallelism(tp=4)
    assert splits_over(mixture, 4, groups=StoredGroups(128)) == Parallelism(tp=4, ep=4)
    assert splits_over(mixture, 4, ep=4) == Parallelism(tp=4, ep=4)
    assert splits_over(SHAPES["mixtral-8x7b"], 16, ep=16) is None, "there are 8 experts"


@settings(max_examples=examples(40))
@given(config=shapes(), tp=st.integers(1, 12))
def test_ranks_share_out_tokens_where_there_are_more_of_them_than_heads_of_keys(config: ModelConfig, tp: int) -> None:
    found = splits_over(config, tp)
    assume(found is not None)
    assert found is not None
    if tp <= config.num_kv_heads:
        assert found.sp == 1
    elif config.num_heads % tp == 0:
        assert config.num_kv_heads % (tp // found.sp) == 0, "some would keep copies"
    assert splits_over(config, tp, sp=1) in (None, replace(found, sp=1))


def test_groups_that_cannot_have_the_same_keys_are_refused_by_name() -> None:
    told = told_obstacle(THREE_KEYS, Parallelism(tp=4, sp=2))
    assert told is not None
    assert told.startswith(
        "3 heads of keys and values cannot be split over 2 groups of 2 ranks: groups must divide them"
    )
    assert "15 query heads cannot be split over 2 ranks" in str(told_obstacle(THREE_KEYS, Parallelism(tp=2, sp=2)))
    assert "3 ranks cannot be split into groups of 2" in str(told_obstacle(THREE_KEYS, Parallelism(tp=3, sp=2)))


def test_what_works_with_sp_is_told_with_it() -> None:
    shape = replace(SHAPES["llama8b"], num_heads=24, num_kv_heads=3, intermediate_size=12_288)
    told = told_obstacle(shape, Parallelism(tp=4, sp=2))
    assert told is not None
    assert told.endswith("Numbers of ranks that work with sp 2: 2, 6, 12")


def test_a_recurrent_state_is_split_by_heads_and_never_by_tokens() -> None:
    hybrid = SHAPES["qwen3-next-80b-a3b"]
    assert splits_over(hybrid, 4) == Parallelism(tp=4), "copies of two heads of keys, and no sharing of tokens"
    assert "each follows from the one before" in str(split_obstacle(hybrid, Parallelism(tp=4, sp=2)))
    assert hybrid.linear is not None
    few = replace(hybrid, linear=replace(hybrid.linear, num_key_heads=2, num_value_heads=4))
    assert "2 heads of linear attention cannot be split over 4 ranks" in str(split_obstacle(few, Parallelism(tp=4)))


def test_groups_of_experts_in_mxfp4_are_not_cut() -> None:
    """Where they would be, whole experts are shared out."""
    config = SHAPES["gpt-oss-20b"]
    assert splits_over(config, 2) == Parallelism(tp=2)
    assert splits_over(config, 4) == Parallelism(tp=4, ep=4)
    assert "720 for each, and groups of 32" in str(split_obstacle(config, Parallelism(tp=4)))
