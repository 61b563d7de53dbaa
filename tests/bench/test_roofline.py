from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.roofline import EngineWorkload, Roofline, context_read, query_positions
from penstock.bench.shapes import SHAPES
from penstock.capacity.hardware import by_driver_name

GPU = by_driver_name("NVIDIA H200")
assert GPU is not None
assert GPU.measured is not None
H200 = GPU.measured
LLAMA_8B = SHAPES["llama8b"]
HEAD = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
LAYERS = LLAMA_8B.num_parameters - 2 * HEAD  # the norms of all layers among them


def roofline(*, shape: str = "llama8b", dtype: str = "bfloat16", quant: str = "none", kv: str = "bfloat16") -> Roofline:
    return Roofline(SHAPES[shape], dtype, quant, kv, H200)


def test_a_step_reads_every_weight_but_the_embedding() -> None:
    assert roofline().weight_bytes == 2 * (LAYERS + HEAD)
    assert roofline().weight_bytes == pytest.approx(3.40e-3 * 4.41e12, rel=0.01)  # 3.40 ms at 4.41 TB/s


def test_a_tied_embedding_is_read_as_the_head() -> None:
    assert roofline(shape="llama1b").weight_bytes == 2 * SHAPES["llama1b"].num_parameters


def test_fp8_halves_the_layers_but_not_the_head() -> None:
    assert roofline(quant="fp8").weight_bytes == LAYERS + 2 * HEAD


def test_bandwidth_counts_weights_once_a_step_and_the_context_of_every_decode() -> None:
    work = EngineWorkload("w", [(100, 3)])
    kv_bytes = LLAMA_8B.kv_bytes_per_token(2) * (101 + 102)  # of three tokens, the prompt's step makes the first
    read_bytes = 3 * roofline().weight_bytes + kv_bytes
    assert roofline().mbu(work, steps=3, seconds=0.5) == pytest.approx(read_bytes / 0.5 / 4.41e12)
    saved = roofline().mbu(work, 3, 0.5) - roofline(kv="fp8").mbu(work, 3, 0.5)
    assert saved == pytest.approx(kv_bytes / 2 / 0.5 / 4.41e12)


def test_operations_are_those_of_linears_and_attention_and_of_the_head_where_a_token_is_chosen() -> None:
    work = EngineWorkload("w", [(4, 2)])
    linear, head = 2 * LAYERS * 5, 2 * HEAD * 2
    attention = 4 * 32 * 128 * 32 * (1 + 2 + 3 + 4 + 5)
    assert roofline().mfu(work, seconds=0.5) == pytest.approx((linear + head + attention) / 0.5 / 765e12)
    best_s = linear / 1402e12 + (head + attention) / 765e12  # each at the peak of its own format
    assert roofline(quant="fp8").mfu(work, seconds=0.5) == pytest.approx(best_s / 0.5)


def test_no_share_of_a_peak_that_nobody_measured() -> None:
    assert roofline(dtype="float32").mfu(EngineWorkload("w", [(4, 2)]), seconds=0.5) is None


lengths = st.lists(st.tuples(st.integers(9, 40), st.integers(1, 9)), min_size=1, max_size=5)


@given(lengths=lengths, shared=st.integers(0, 8))
def test_what_is_shared_is_computed_once_and_read_once_a_step(lengths: list[tuple[int, int]], shared: int) -> None:
    work = EngineWorkload("w", lengths, shared)
    computed = sum(end - start for start, end in query_positions(work))
    assert computed == sum(p + o - 1 for p, o in lengths) - shared * (len(lengths) - 1)
    longest = max(output for _, output in lengths)
    own = sum(prompt - shared + i for prompt, output in lengths for i in range(1, output))
    assert context_read(work) == own + shared * (longest - 1)
