"""Weights in groups of 16, and in blocks of 256, on a GPU: small, near the numbers they stand for, and multiplied as
they are; or on no GPU, interpreted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from penstock.hub.gguf_blocks import grouped as read_blocks
from penstock.model.ops import Norm, Stream
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.linear import q6k
from penstock.model.ops.triton.linear.int4_pack import narrowed
from penstock.model.ops.triton.linear.w4a16_gemm import dequantized
from penstock.model.ops.triton.linear.w4a16_linear import W4A16Linear
from penstock.model.quantized import joined
from penstock.model.quantized.grouped import Bits, GroupedWeight, packed
from penstock.model.weights import on_device
from tests.devices import BFLOAT16, DEVICE, IS_INTERPRETED, SLOW_INTERPRETED, matrix, slow
from tests.hub.gguf_random import BLOCKS, random_blocks

FEW_OUTPUTS = 16 if IS_INTERPRETED else 64
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16], ids=str)
# Bytes of a weight, at most: integers, a scale and what a group adds, in half precision.
SIZES = {
    "Q2_K": 0.75,
    "Q3_K": 0.625,
    "Q4_0": 0.5625,
    "Q4_1": 0.625,
    "Q4_K": 0.625,
    "Q5_0": 1.0625,
    "Q5_1": 1.125,
    "Q5_K": 1.125,
    "Q6_K": 1.125,
    "Q8_0": 1.0625,
}


def fine(out: int, columns: int, bits: Bits, kind: str, *, ordered: bool = False) -> GroupedWeight:
    dice = torch.Generator().manual_seed(7)
    shape = (out, columns // 16)
    values = torch.randint(0, 1 << bits, (out, columns), generator=dice, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=dice) + 0.5) * columns**-0.5 / (1 << (bits - 2))
    zeros = torch.randint(1, 1 << bits, shape, generator=dice, dtype=torch.uint8).to(DEVICE)
    minimums = -torch.rand(shape, generator=dice) * columns**-0.5
    return GroupedWeight(
        (packed(values) if bits == 4 else values).to(DEVICE),
        bits,
        scales.half().to(DEVICE),
        zeros if kind == "zeros" else None,
        minimums.half().to(DEVICE) if kind == "minimums" else None,
        torch.randperm(columns, generator=dice).to(DEVICE) if ordered else None,
    )


def blocks(name: str, out: int = FEW_OUTPUTS, columns: int = 512) -> GroupedWeight:
    """As they come from a file."""
    type = GGMLQuantizationType[name]
    found = read_blocks(random_blocks(type, out, columns), type, out)
    assert found is not None
    kept = on_device(found, torch.device(DEVICE))
    assert isinstance(kept, GroupedWeight)
    return kept


def rows_of(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@DTYPES
@pytest.mark.parametrize(
    ("bits", "kind", "size"),
    matrix(
        list(product([4, 8], ["symmetric", "zeros", "minimums"], [(64, 256), (96, 1200)])),
        [(4, "minimums", (16, 256)), (8, "zeros", (16, 176)), slow(4, "symmetric", (96, 1200))],
    ),
)
def test_a_product_with_groups_of_16(bits: Bits, kind: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    columns, weight = size[1], fine(*size, bits, kind)
    linear, expected = TritonOps(DEVICE, dtype).linear(weight), weight.dequantized()
    assert isinstance(linear, W4A16Linear)
    assert linear.weight.group_size == q6k.GROUP
    for count in matrix([1, 2, 8, 9, 16, 17, 600], [11]):
        x = rows_of(count, columns, dtype)
        assert relative_error(linear(x), x.float() @ expected.T) < TOLERANCES[dtype]


@SLOW_INTERPRETED
@pytest.mark.parametrize("count", matrix([1, 40], [1]))
def test_bias_and_order_of_columns(count: int) -> None:
    weight = fine(64, 256, 8, "zeros", ordered=True)
    bias, x = torch.randn(64).half(), rows_of(count, 256, torch.float16)
    found = TritonOps(DEVICE, torch.float16).linear(weight, bias)(x)
    assert relative_error(found, x.float() @ weight.dequantized().T + bias.to(DEVICE).float()) < 2e-3


@SLOW_INTERPRETED
@pytest.mark.parametrize("count", matrix([1, 3, 40], [1]))
def test_a_layer_in_groups_of_16_adds_norms_and_gates_as_the_reference_does(count: int) -> None:
    hidden, ffn, results = 128, 64, []
    output, gate_up, down = fine(hidden, hidden, 8, "minimums"), fine(2 * ffn, hidden, 4, "zeros"), blocks("Q6_K", 128)
    for ops in (TritonOps(DEVICE, torch.float16), ReferenceOps(DEVICE)):
        dtype = ops.activation_dtype
        stream = Stream(rows_of(count, hidden, dtype))
        norm = Norm(torch.ones(hidden, dtype=dtype, device=DEVICE), 1e-5)
        ops.add_linear(stream, rows_of(count + 100, hidden, dtype)[:count], ops.linear(output))
        wide = ops.linear(fine(1024, hidden, 8, "symmetric"))
        ops.feed_forward(stream, norm, wide, ops.linear(down))
        results.append(ops.norm_linear(stream, norm, ops.linear(gate_up)))
    assert relative_error(*results) < 5e-3


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_file_stay_small(name: str) -> None:
    weight = blocks(name, 64)
    linear = TritonOps(DEVICE, torch.float16).linear(weight)
    assert isinstance(linear, W4A16Linear)
    assert linear.weight.num_bytes / weight.shape.numel() <= SIZES[name]


@pytest.mark.parametrize(
    "name", matrix(list(BLOCKS), [name if name in ("Q2_K", "Q5_K", "Q8_0") else slow(name) for name in BLOCKS])
)
def test_blocks_of_a_file_stand_for_its_numbers(name: str) -> None:
    """No weight is further away than a thousandth of what is largest in its group."""
    weight = blocks(name)
    linear = TritonOps(DEVICE, torch.float16).linear(weight)
    assert isinstance(linear, W4A16Linear)
    expected = weight.dequantized()
    error = (dequantized(linear.weight, torch.float32) - expected).abs().view(len(expected), -1, weight.group_size)
    largest = expected.abs().view(error.shape).amax(dim=2, keepdim=True)
    assert bool((error <= 1e-3 * largest + 1e-6).all())


def test_groups_that_count_from_the_middle_lose_nothing_but_the_scales_last_bits() -> None:
    for name in ("Q4_0", "Q5_0", "Q8_0"):
        weight = blocks(name)
        assert torch.equal(narrowed(weight).dequantized(), weight.dequantized())


def test_scales_that_half_precision_cannot_hold_stay_as_they_are() -> None:
    weight = GroupedWeight(torch.zeros(2, 16, dtype=torch.uint8), 4, torch.full((2, 1), 1e6))
    assert narrowed(weight) is weight


@SLOW_INTERPRETED
def test_blocks_of_several_types_join_and_stay_small() -> None:
    """In a Q4_K_M file q and k are Q4_K, and v is Q6_K."""
    parts = [blocks(name, 64) for name in ("Q4_K", "Q4_K", "Q6_K")]
    together = joined(parts)
    assert isinstance(together, GroupedWeight)
    linear = TritonOps(DEVICE, torch.float16).linear(together)
    assert isinstance(linear, W4A16Linear)
    assert linear.weight.group_size == q6k.GROUP
    assert linear.weight.num_bytes / together.shape.numel() <= 1.25
    x = rows_of(3, 512, torch.float16)
    expected = torch.cat([x.float() @ part.dequantized().T for part in parts], dim=1)
    assert relative_error(linear(x), expected) < 2e-3


@SLOW_INTERPRETED
def test_an_embedding_and_a_head_in_groups_of_16() -> None:
    table = blocks("Q6_K", 96)
    embedding, head = TritonOps(DEVICE, torch.float16).tied(table)
    ids = torch.tensor([3, 95, 3, 40], dtype=torch.int32, device=DEVICE)
    np.testing.assert_allclose(
        embedding(ids).float().cpu().numpy(), table.dequantized()[ids.long()].cpu().numpy(), rtol=2e-3, atol=1e-4
    )
    x = rows_of(2, 512, torch.float16)
    assert relative_error(head(x), x.float() @ table.dequantized().T) < 2e-3
