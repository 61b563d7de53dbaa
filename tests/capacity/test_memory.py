from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capacity.formats import Formats
from penstock.capacity.hardware import hardware
from penstock.capacity.memory import kv_tokens_that_fit, memory_of
from penstock.capacity.model_bytes import ModelBytes
from penstock.capacity.shapes import SHAPES
from penstock.core.parallelism import Parallelism

H200 = hardware()["h200"]


def test_it_comes_within_three_percent_of_what_an_engine_found_free() -> None:
    """docs/benchmarks.md: 8B in FP8 with an FP8 cache on an H200."""
    found = kv_tokens_that_fit(SHAPES["llama8b"], H200, formats=Formats("fp8", "fp8"))
    assert found == pytest.approx(1_858_048, rel=0.03)


def test_a_model_too_large_leaves_nothing() -> None:
    assert memory_of(SHAPES["llama70b"], hardware()["h100"]).kv_tokens == 0


@given(
    gib=st.floats(8, 300),
    more=st.floats(0, 200),
    shape=st.sampled_from(sorted(SHAPES)),
    weights=st.sampled_from(["bfloat16", "fp8", "int4"]),
    tensor=st.sampled_from([1, 2, 4, 8]),
)
def test_more_memory_never_fits_fewer_tokens(gib: float, more: float, shape: str, weights: str, tensor: int) -> None:
    def fits(memory_gib: float) -> int:
        gpu = replace(H200, memory_gib=memory_gib)
        return kv_tokens_that_fit(SHAPES[shape], gpu, formats=Formats(weights), parallelism=Parallelism(tensor))

    assert fits(gib + more) >= fits(gib)


@given(shape=st.sampled_from(sorted(SHAPES)), tensor=st.sampled_from([1, 2, 4, 8]), stages=st.sampled_from([1, 2, 4]))
def test_smaller_numbers_and_more_gpus_never_fit_less(shape: str, tensor: int, stages: int) -> None:
    def fits(formats: Formats, parallelism: Parallelism) -> int:
        return kv_tokens_that_fit(SHAPES[shape], H200, formats=formats, parallelism=parallelism)

    wide = fits(Formats(), Parallelism(tensor, stages))
    assert fits(Formats("fp8"), Parallelism(tensor, stages)) >= wide
    assert fits(Formats(kv="fp8"), Parallelism(tensor, stages)) >= wide
    assert fits(Formats(), Parallelism(2 * tensor, stages)) >= wide
    assert fits(Formats(), Parallelism(tensor, 2 * stages)) >= wide


@pytest.mark.parametrize(("shape", "gib"), [("mixtral-8x7b", 87.0), ("qwen3-30b-a3b", 56.9)])
def test_all_experts_of_a_mixture_are_in_memory_however_few_a_step_reads(shape: str, gib: float) -> None:
    memory = memory_of(SHAPES[shape], H200)
    assert memory.weight_bytes / 2**30 == pytest.approx(gib, abs=0.1)
    assert ModelBytes(SHAPES[shape]).read_bytes_of(1) < memory.weight_bytes / 2


@pytest.mark.parametrize(("shape", "gb"), [("gpt-oss-20b", 13.75), ("gpt-oss-120b", 65.17)])
def test_experts_in_mxfp4_take_a_quarter_and_all_else_stays_wide(shape: str, gb: float) -> None:
    """One card of 80 GB holds the larger one, with a cache."""
    model = ModelBytes(SHAPES[shape], Formats("mxfp4"))
    assert model.stored_bytes / 1e9 == pytest.approx(gb, abs=0.01)
    assert model.read_bytes_of(1) < model.stored_bytes / 2
    assert kv_tokens_that_fit(SHAPES[shape], hardware()["h100"], formats=Formats("mxfp4")) > 100_000


def test_a_cache_of_integers_has_a_scale_for_each_head() -> None:
    config = SHAPES["llama8b"]
    wide, small = (ModelBytes(config, Formats(kv=kv)).kv_bytes_per_token for kv in ("bfloat16", "int8"))
    assert small == 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 2)
    assert 1.9 < wide / small < 2.0


def test_ranks_that_share_out_tokens_have_room_for_as_many_times_as_many() -> None:
    """One head of keys, on four ranks: each would keep all of it."""
    config = replace(SHAPES["llama8b"], num_kv_heads=1)
    copied, shared = (memory_of(config, H200, parallelism=Parallelism(tp=4, sp=sp)) for sp in (1, 4))
    assert shared.weight_bytes == copied.weight_bytes
    assert shared.kv_tokens == pytest.approx(4 * copied.kv_tokens, rel=0.01), "but for what a step takes more"
    assert shared.kv_bytes == pytest.approx(copied.kv_bytes, rel=0.01)


def test_recurrent_states_take_of_the_room_for_keys_and_values() -> None:
    hybrid = SHAPES["qwen3.5-35b-a3b"]
    alone, together = (memory_of(hybrid, H200, parallelism=Parallelism(tp)) for tp in (1, 2))
    assert alone.state_bytes == (256 + 32 + 1) * hybrid.state_bytes
    assert together.state_bytes == alone.state_bytes // 2, "heads are split"
    few = memory_of(hybrid, H200, max_num_seqs=32)
    assert few.kv_bytes - alone.kv_bytes >= alone.state_bytes - few.state_bytes > 0
    assert memory_of(SHAPES["llama8b"], H200).state_bytes == 0
