"""A KV cache in int8: the C kernels keep the very numbers that the reference keeps, read the same from them, and give
a row the same result to the bit whatever it was computed with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.model_config import INT8_KV_SCALE_BYTES
from penstock.model.ops import KVShape, Ops
from penstock.model.ops.library import CACHED_INT8
from penstock.model.ops.native import NativeOps
from penstock.model.ops.reference import SCALE, ReferenceOps, as_read, as_stored
from tests.examples import examples
from tests.model.ops.test_native import SHAPES, Attention, Shape, new_sequence, unavailable

OWN_VALUES = [shape for shape in SHAPES if shape.value_dim is None]

DIGITS, WIDENED = CACHED_INT8
# Queries and weights are rounded to 15 bits for products of integers; otherwise both compute with the same numbers.
# Half a step of each weight, over 280 tokens, comes to 1.5e-4; the worst of half a million numbers to five times that.
TOLERANCE = {DIGITS: 1e-3, WIDENED: 1e-5}
ROUNDING = 1e-6  # of a norm, a rotation and a division in float32: more than they ever differ by


@lru_cache
def native(kv_arithmetic: int, threads: int = 2) -> NativeOps:
    ops = NativeOps("float32", threads=threads, kv_dtype=torch.int8)
    ops.kv_arithmetic = kv_arithmetic
    return ops


def lacks(kv_arithmetic: int) -> bool:
    return unavailable("float32") is not None or not native(kv_arithmetic).library.arithmetic_at(kv_arithmetic)


@pytest.fixture(params=CACHED_INT8, ids=["digits", "widened"])
def ops(request: pytest.FixtureRequest) -> NativeOps:
    if lacks(request.param):
        pytest.skip("no compiler, or no instruction for it")
    torch.manual_seed(0)
    return native(request.param)


def fed(ops: Ops, shape: Shape, qkvs: Sequence[Tensor], pieces: Sequence[int]) -> Tensor:
    """All sequences side by side, so many tokens of each in a step."""
    attention = Attention(ops, shape, num_blocks=sum(len(qkv) // shape.block_size + 1 for qkv in qkvs))
    sequences = [new_sequence(len(qkv)) for qkv in qkvs]
    outputs: list[list[Tensor]] = [[] for _ in qkvs]
    for count in [*pieces, max(map(len, qkvs))]:
        work = [(i, qkv[sequences[i].computed :][:count]) for i, qkv in enumerate(qkvs)]
        work = [(i, rows) for i, rows in work if len(rows)]
        found = attention.step([(sequences[i], rows) for i, rows in work]) if work else []
        for (i, _), out in zip(work, found, strict=True):
            outputs[i].append(out)
    return torch.cat([torch.cat(parts) for parts in outputs])


def undecided(shape: Shape, qkv: Tensor) -> Tensor:
    """[tokens, kv heads]: whether the key, once it is normed, lies so near between two integers, or its scale between
    two numbers of 16 bits, that a sum in another order makes it the other one."""
    attention, sequence = Attention(ReferenceOps(), shape, len(qkv) // shape.block_size + 1), new_sequence(len(qkv))
    attention.step([(sequence, qkv)])
    keys = attention.kv.keys[sequence.blocks].flatten(0, 1)[: len(qkv)]  # [tokens, kv heads, dim]
    error = ROUNDING * (keys.abs() + keys.abs().roll(shape.dim // 2, dims=-1))  # a rotation mixes two numbers
    scales = keys.abs().amax(-1, keepdim=True) / 127
    integers = [((keys + by) / scales.to(SCALE).float()).round() for by in (-error, error)]
    kept = [(scales * (1 + by)).to(SCALE) for by in (-ROUNDING, ROUNDING)]
    return ((integers[0] != integers[1]) | (kept[0] != kept[1])).any(-1)


def draw_undecided_again(shape: Shape, qkv: Tensor, spread: float, generator: torch.Generator) -> None:
    """Keys that are only rotated are the same to the bit in both; of those that are normed first, those that are
    decided are: both then attend to the same integers."""
    first, last = shape.heads * shape.dim, (shape.heads + shape.kv_heads) * shape.dim
    keys = qkv[:, first:last].view(len(qkv), shape.kv_heads, shape.dim)
    while shape.has_norms and (again := undecided(shape, qkv)).any():
        keys[again] = torch.randn(int(again.sum()), shape.dim, generator=generator) * spread


@settings(max_examples=examples(10))
@given(
    kv_arithmetic=st.sampled_from(CACHED_INT8),
    shape=st.sampled_from(OWN_VALUES),
    lengths=st.lists(st.integers(1, 280), min_size=1, max_size=2),
    pieces=st.lists(st.integers(1, 120), max_size=2),
    spread=st.sampled_from((1e-3, 1.0, 30.0)),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_references(
    kv_arithmetic: int, shape: Shape, lengths: list[int], pieces: list[int], spread: float, seed: int
) -> None:
    assume(not lacks(kv_arithmetic))
    generator = torch.Generator().manual_seed(seed)
    qkvs = [torch.randn(n, (shape.heads + 2 * shape.kv_heads) * shape.dim, generator=generator) for n in lengths]
    for qkv in qkvs:
        qkv[:, shape.heads * shape.dim :] *= spread
        qkv[:, : shape.heads * shape.dim] /= spread  # scores of a size in which softmax is no step
        draw_undecided_again(shape, qkv, spread, generator)
    ours = fed(native(kv_arithmetic), shape, qkvs, pieces)
    theirs = fed(ReferenceOps(kv_dtype=torch.int8), shape, qkvs, pieces)
    tolerance = TOLERANCE[kv_arithmetic]
    torch.testing.assert_close(ours, theirs, atol=spread * tolerance, rtol=tolerance)


@settings(max_examples=examples(12))
@given(
    kv_arithmetic=st.sampled_from(CACHED_INT8),
    shape=st.sampled_from(OWN_VALUES),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    pieces=st.lists(st.integers(1, 120), max_size=4),
    threads=st.sampled_from((1, 2, 3)),
)
def test_attention_of_a_row_does_not_depend_on_how_it_was_batched(
    kv_arithmetic: int, shape: Shape, lengths: list[int], pieces: list[int], threads: int
) -> None:
    assume(not lacks(kv_arithmetic))
    qkvs = [shape.random_qkv(length) for length in lengths]
    together = fed(native(kv_arithmetic, threads), shape, qkvs, pieces)
    alone = torch.cat([fed(native(kv_arithmetic), shape, [qkv], []) for qkv in qkvs])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(4, 2, 24, block_size=5)], ids=str)
def test_numbers_in_the_cache_are_the_references(ops: NativeOps, shape: Shape) -> None:
    """A lone token attends to itself: its output is its value, as it is kept."""
    qkv = shape.random_qkv(1)
    qkv[0, -1] = 40.0  # an outlier takes most of the range
    value = qkv[0, -shape.kv_heads * shape.dim :].view(shape.kv_heads, shape.dim)
    expected = as_read(as_stored(value, 1.0, torch.int8), torch.float32).repeat_interleave(2, dim=0)
    out = fed(ops, shape, [qkv], []).view(shape.heads, shape.dim)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-4)


def test_what_a_block_s_former_owner_left_is_not_seen(ops: NativeOps) -> None:
    shape = Shape(4, 2, 64)
    qkv = shape.random_qkv(21)
    clean, soiled = Attention(ops, shape, 8), Attention(ops, shape, 8)
    for cache in (soiled.kv.keys, soiled.kv.values):
        cache.fill_(0xFF)  # scales that are NaN
    sequences = new_sequence(21), new_sequence(21)
    for piece in (qkv[:20], qkv[20:]):
        expected = clean.step([(sequences[0], piece)])[0]
        assert torch.equal(soiled.step([(sequences[1], piece)])[0], expected)


def test_heads_of_zeros_and_of_very_small_and_large_numbers_stay_numbers(ops: NativeOps) -> None:
    shape = Shape(4, 2, 64)
    for size in (0.0, 1e-42, 1e-30, 1e18):
        qkv = shape.random_qkv(40) * size
        out = fed(ops, shape, [qkv], [])
        assert out.isfinite().all()
        assert out.abs().max() <= qkv.abs().max() * 1.01


@pytest.mark.parametrize("block_size", [16, 5])
def test_a_copied_block_is_read_as_its_source(ops: NativeOps, block_size: int) -> None:
    shape = Shape(4, 2, 64, block_size=block_size)
    qkv = shape.random_qkv(2 * block_size + 1)
    attention = Attention(ops, shape, 12)
    source = new_sequence(len(qkv))
    attention.step([(source, qkv[:-1])])
    copy = new_sequence(len(qkv))
    copy.blocks, copy.computed = attention._free[-3:], len(qkv) - 1
    del attention._free[-3:]
    ops.copy_blocks([attention.kv], list(zip(source.blocks, copy.blocks, strict=False)))
    first, second = attention.step([(source, qkv[-1:]), (copy, qkv[-1:])])
    assert torch.equal(first, second)


def test_a_cache_takes_a_byte_for_each_number_and_two_for_each_scale(ops: NativeOps) -> None:
    shape = KVShape(num_layers=3, num_blocks=7, block_size=16, num_kv_heads=2, head_dim=64)
    each: list[Ops] = [ops, ReferenceOps(kv_dtype=torch.int8)]
    for one in each:
        held = sum(t.numel() * t.itemsize for layer in one.allocate_kv(shape) for t in (layer.keys, layer.values))
        assert held == 2 * 3 * 7 * 16 * 2 * (64 + INT8_KV_SCALE_BYTES)


def test_an_untouched_reference_cache_in_int8_is_zeros() -> None:
    kept = as_stored(torch.zeros(2, 3, 8), 1.0, torch.int8)
    assert torch.equal(as_read(kept, torch.float32), torch.zeros(2, 3, 8))
