from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import hardware
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.shapes import SHAPES
from penstock.capacity.step_cost import PENSTOCK, Constants, StepCost
from penstock.core.parallelism import Parallelism

H200 = hardware()["h200"]
IDEAL = Constants(bandwidth_efficiency=1, flops_efficiency=1, layer_overhead_s=0, sequence_overhead_s=0)
LLAMA_8B = SHAPES["llama8b"]
HEAD = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
LAYERS = LLAMA_8B.num_parameters - 2 * HEAD


def test_one_decode_reads_the_weights_and_its_context() -> None:
    cost = StepCost(LLAMA_8B, H200, IDEAL)
    read_bytes = 2 * (LAYERS + HEAD) + 1000 * LLAMA_8B.kv_bytes_per_token(2)
    assert cost.seconds(0, 0, 1, 1000) == pytest.approx(read_bytes / 4.8e12)


def test_a_long_prompt_is_bound_by_products_and_attention() -> None:
    cost = StepCost(LLAMA_8B, H200, IDEAL)
    flops = 2 * LAYERS * 8192 + 4 * 32 * 128 * 32 * 10**6
    assert cost.seconds(8192, 10**6, 0, 0) == pytest.approx(flops / 989e12)


def test_each_constant_does_what_its_name_says() -> None:
    def seconds(constants: Constants) -> float:
        return StepCost(LLAMA_8B, H200, constants).seconds(0, 0, 4, 0)

    best = seconds(IDEAL)
    assert seconds(replace(IDEAL, bandwidth_efficiency=0.5)) == pytest.approx(2 * best)
    assert seconds(replace(IDEAL, layer_overhead_s=1e-3)) == pytest.approx(best + 32e-3)
    assert seconds(replace(IDEAL, sequence_overhead_s=1e-3)) == pytest.approx(best + 4e-3)


def test_weights_that_a_gpu_cannot_multiply_are_read_small_and_multiplied_wide() -> None:
    a100 = hardware()["a100"]
    wide, small = (StepCost(LLAMA_8B, a100, IDEAL, formats=Formats(name)) for name in ("bfloat16", "fp8"))
    assert small.read_s < 0.6 * wide.read_s
    assert small.linear_token_s == wide.linear_token_s


def test_tensor_parallelism_shares_the_work_and_pays_for_the_link() -> None:
    one, two = (StepCost(LLAMA_8B, H200, IDEAL, parallelism=Parallelism(n)) for n in (1, 2))
    assert two.read_s == pytest.approx(one.read_s / 2, rel=1e-4)  # each has all the norms
    assert two.fixed_s - one.fixed_s == pytest.approx((2 * 32 + 2) * 10e-6)  # the embedding's sum, the logits' gather
    assert two.token_s == pytest.approx((2 * 32 + 1) * 4096 * 2 / 450e9)
    assert two.sequence_s == pytest.approx(128_256 / 2 * 2 / 450e9)
    assert two.communication_s(0, 1) == pytest.approx(two.fixed_s + two.token_s + two.sequence_s)
    assert one.communication_s(100, 100) == one.token_s == 0


def test_heads_of_keys_fewer_than_gpus_are_held_more_than_once() -> None:
    few = replace(LLAMA_8B, num_kv_heads=2)
    two, eight = (StepCost(few, H200, IDEAL, parallelism=Parallelism(n)) for n in (2, 8))
    assert eight.kv_token_s == two.kv_token_s


step = st.tuples(st.integers(0, 20_000), st.integers(0, 10**8), st.integers(0, 512), st.integers(0, 10**6))


@given(step=step, more=step, shape=st.sampled_from(sorted(SHAPES)))
def test_more_in_a_step_never_takes_less(step: tuple[int, ...], more: tuple[int, ...], shape: str) -> None:
    cost = StepCost(SHAPES[shape], H200)
    both = [a + b for a, b in zip(step, more, strict=True)]
    assert cost.seconds(*both) >= cost.seconds(*step[:4]) > 0


def test_a_mixture_reads_only_the_experts_that_its_tokens_are_given() -> None:
    mixture = SHAPES["mixtral-8x7b"]
    cost = StepCost(mixture, H200, IDEAL)
    head = mixture.vocab_size * mixture.hidden_size
    expert = 32 * 3 * mixture.hidden_size * mixture.intermediate_size
    rest = mixture.num_parameters - head - 8 * expert  # the embedding is not read, the head is
    assert cost.seconds(0, 0, 1, 0) == pytest.approx(2 * (rest + 2 * expert) / 4.8e12)
    assert cost.seconds(0, 0, 2, 0) == pytest.approx(2 * (rest + 3.5 * expert) / 4.8e12)  # a quarter of them is shared
    assert cost.seconds(0, 0, 64, 0) == pytest.approx(2 * (rest + 8 * expert) / 4.8e12)


@pytest.mark.parametrize("batch", [1, 4, 32, 512])
def test_a_mixture_of_many_small_experts_reads_more_of_them_the_larger_the_batch(batch: int) -> None:
    """Qwen3-30B-A3B: 8 of 128 experts for each token, in each of 48 layers."""
    mixture = SHAPES["qwen3-30b-a3b"]
    head = mixture.vocab_size * mixture.hidden_size
    expert = 48 * 3 * 2048 * 768
    rest = mixture.num_parameters - head - 128 * expert
    read = rest + 128 * expert * (1 - (120 / 128) ** batch)
    assert ModelBytes(mixture).read_bytes_of(batch) == pytest.approx(2 * read)
    assert StepCost(mixture, H200, IDEAL).seconds(0, 0, batch, 0) == pytest.approx(2 * read / 4.8e12)
    share = read / (mixture.num_parameters - head)
    assert {1: 0.10, 4: 0.27, 32: 0.88, 512: 1.0}[batch] == pytest.approx(share, abs=0.03)


def test_a_token_of_a_mixture_costs_the_products_of_its_own_experts() -> None:
    mixture = SHAPES["mixtral-8x7b"]
    active = mixture.num_active_parameters - 2 * mixture.vocab_size * mixture.hidden_size
    assert StepCost(mixture, H200, IDEAL).seconds(8192, 0, 0, 0) == pytest.approx(8192 * 2 * active / 989e12)


def test_tokens_that_are_shared_out_are_read_by_one_rank_and_exchanged_by_all() -> None:
    config = replace(SHAPES["llama8b"], num_kv_heads=1)
    gpu = hardware()["h200"]
    copied, shared = (StepCost(config, gpu, PENSTOCK, parallelism=Parallelism(tp=4, sp=sp)) for sp in (1, 4))
    assert shared.kv_token_s == pytest.approx(copied.kv_token_s / 4)
    assert shared.pair_s == copied.pair_s, "more queries on as many times fewer tokens"
    assert shared.sync_s - copied.sync_s == pytest.approx(2 * config.num_layers * gpu.link_latency_us * 1e-6)
    heads_bytes = 2 * config.num_heads * config.head_dim / 4
    per_s = gpu.link_gb_s * 1e9 * PENSTOCK.bandwidth_efficiency
    assert shared.token_s - copied.token_s == pytest.approx(2 * config.num_layers * 3 * heads_bytes / per_s)
