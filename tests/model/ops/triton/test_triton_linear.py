"""Norms, linears and SwiGLU on a GPU equal the torch reference, alone and fused; or on no GPU, interpreted."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from penstock.model.ops import Norm, Stream
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.ops.triton.common import rowwise
from penstock.model.ops.triton.common.argmax import argmax
from penstock.model.ops.triton.linear import gemv
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.quant import to_quant
from penstock.quant.e4m3 import quantized
from tests.devices import BFLOAT16, DEVICE, NEEDS_FP8, matrix, slow

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16], ids=str)
ROWS = [1, 2, 8, 9, 16, 17, 40]
SIZES = [(64, 96), (576, 1536), (512, 1024), (1024, 5000)]


def close(ours: Tensor, theirs: Tensor) -> None:
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs) * inputs**-0.5


def norm(hidden: int, dtype: torch.dtype) -> Norm:
    return Norm(torch.randn(hidden, device=DEVICE).to(dtype), 1e-5)


def rows_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE).to(dtype)


@DTYPES
@pytest.mark.parametrize(
    ("rows", "columns"), matrix([(1, 64), (3, 576), (17, 2048), (2, 5000), (5, 8192)], [(1, 64), (3, 576)])
)
def test_norm_adds_what_is_pending(dtype: torch.dtype, rows: int, columns: int) -> None:
    x, pending = rows_of(rows, columns, dtype), rows_of(rows, columns, dtype)
    weights = norm(columns, dtype)
    reference = ReferenceOps(DEVICE, dtype)
    close(rowwise.rms_norm(Stream(x), weights), reference.rms_norm(x, weights.weight, 1e-5))
    stream = Stream(x.clone(), pending)
    close(rowwise.rms_norm(stream, weights), reference.rms_norm(x + pending, weights.weight, 1e-5))
    assert torch.equal(stream.residual, x + pending)
    assert stream.pending is None


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), matrix([(1, 96), (5, 1536), (3, 14336)], [(1, 96), (2, 2200)]))
def test_swiglu_equals_the_reference(dtype: torch.dtype, rows: int, columns: int) -> None:
    gate_up = rows_of(rows, 2 * columns, dtype)
    close(rowwise.silu_mul(gate_up), ReferenceOps(DEVICE, dtype).silu_mul(gate_up))


# Interpreted: outputs that no program's share divides, rows longer than a program holds, a few rows, and many.
LINEARS = matrix(
    list(product(TOLERANCES, ROWS, [(7, 64), (960, 576), (512, 1024), (33, 5000), (64, 20480)], [True, False])),
    [
        (torch.float32, 1, (7, 64), True),
        (torch.float16, 1, (9, 20480), False),
        (torch.float16, 2, (32, 1024), True),
        (torch.float16, 16, (32, 512), False),
        (torch.float32, 2, (7, 64), False),
        (torch.float16, 17, (32, 512), True),
    ],
)


@pytest.mark.parametrize(("dtype", "rows", "size", "has_bias"), LINEARS, ids=str)
def test_linears_equal_the_reference(dtype: torch.dtype, rows: int, size: tuple[int, int], has_bias: bool) -> None:
    torch.manual_seed(0)
    outputs, inputs = size
    stored, bias = weight(outputs, inputs), torch.randn(outputs) if has_bias else None
    x = rows_of(rows, inputs, dtype)
    close(TritonOps(DEVICE, dtype).linear(stored, bias)(x), ReferenceOps(DEVICE, dtype).linear(stored, bias)(x))


LAYERS = matrix(
    list(product(TOLERANCES, ROWS, SIZES)),
    [
        (torch.float32, 1, (64, 96)),
        (torch.float16, 1, (96, 64)),
        slow(torch.float16, 3, (512, 512)),
        (torch.float32, 17, (64, 96)),
    ],
)


@pytest.mark.parametrize(("dtype", "rows", "size"), LAYERS, ids=str)
def test_a_layers_linears_equal_the_reference(dtype: torch.dtype, rows: int, size: tuple[int, int]) -> None:
    """As layers use them: one after the other on one stream, whatever was fused."""
    torch.manual_seed(0)
    hidden, wide = size
    x, y, norms = rows_of(rows, hidden, dtype), rows_of(rows, hidden, dtype), norm(hidden, dtype)
    output, gate_up, down = weight(hidden, hidden), weight(2 * wide, hidden), weight(hidden, wide)
    results = []
    for ops in (TritonOps(DEVICE, dtype), ReferenceOps(DEVICE, dtype)):
        stream = Stream(x.clone())
        ops.add_linear(stream, y, ops.linear(output))
        ops.feed_forward(stream, norms, ops.linear(gate_up), ops.linear(down))
        last = torch.tensor([rows - 1], device=DEVICE)  # few rows of what may have been many
        results.append((ops.norm_linear(stream.at(last), norms, ops.head(output)), stream.residual, stream.pending))
    (ours, residual, pending), (theirs, expected, _) = results
    close(residual if pending is None else residual + pending, expected)
    close(ours, theirs)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (3, 8192), (2, 20_000)])
def test_greedy_choice_is_the_first_of_the_largest(dtype: torch.dtype, rows: int, columns: int) -> None:
    logits = torch.randint(-50, 50, (rows, columns), device=DEVICE).to(dtype)  # many are equal
    assert argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert argmax(torch.full_like(logits, torch.nan)).max() < columns


def test_one_row_of_any_width_can_be_multiplied() -> None:
    assert gemv.fits(1, torch.empty(7, 13))
    assert not gemv.fits(2, torch.empty(7, 13))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


@NEEDS_FP8
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 64, 300])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("input_scale", [None, 0.02])
def test_fp8_product_is_that_of_its_numbers(rows: int, has_bias: bool, input_scale: float | None) -> None:
    torch.manual_seed(0)
    small = quantized(weight(1024, 2048).cuda())
    stored = Fp8Weight(small.values, small.scales, input_scale)
    bias = torch.randn(1024).bfloat16() if has_bias else None
    x = rows_of(rows, 2048, torch.bfloat16)
    linear = TritonOps(DEVICE, torch.bfloat16).linear(stored, bias)
    seen = x.float()
    if rows > gemv.MAX_ROWS:  # then rows are FP8 too
        scales = (
            x.float().abs().amax(1, keepdim=True) / 448 if input_scale is None else torch.tensor(input_scale).cuda()
        )
        seen = (seen / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    expected = seen @ stored.dequantized().T + (bias.cuda().float() if bias is not None else 0)
    assert relative_error(linear(x), expected) < 4e-3


@NEEDS_FP8
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("outputs", [4128, 6144, 10240])  # programs for one, two and more of 132 processors
@pytest.mark.parametrize("fp8", [True, False])
def test_few_rows_of_a_wide_model(rows: int, outputs: int, fp8: bool) -> None:
    torch.manual_seed(0)
    ops, columns = TritonOps(DEVICE, torch.bfloat16), 4608
    stored = weight(outputs, columns).cuda()
    seen = quantized(stored).dequantized() if fp8 else stored.bfloat16().float()
    kept = to_quant("fp8" if fp8 else "none", stored)
    x, norms = rows_of(rows, columns, torch.bfloat16), norm(columns, torch.bfloat16)
    normed = ReferenceOps(DEVICE, torch.bfloat16).rms_norm(x, norms.weight, norms.eps)
    assert relative_error(ops.norm_linear(Stream(x), norms, ops.linear(kept)), normed.float() @ seen.T) < 4e-3


@NEEDS_FP8
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_fp8_layer_is_close_to_the_float_one(rows: int) -> None:
    torch.manual_seed(0)
    hidden, wide, dtype = 512, 1024, torch.bfloat16
    x, y, norms = rows_of(rows, hidden, dtype), rows_of(rows, hidden, dtype), norm(hidden, dtype)
    output, gate_up, down = weight(hidden, hidden), weight(2 * wide, hidden), weight(hidden, wide)
    results = []
    for ops, quant in ((TritonOps(DEVICE, dtype), "fp8"), (ReferenceOps(DEVICE, torch.float32), "none")):
        kept = partial(to_quant, quant)
        stream = Stream(x.to(ops.activation_dtype, copy=True))
        norms = Norm(norms.weight.to(ops.activation_dtype), 1e-5)
        ops.add_linear(stream, y.to(ops.activation_dtype), ops.linear(kept(output)))
        ops.feed_forward(stream, norms, ops.linear(kept(gate_up)), ops.linear(kept(down)))
        results.append(ops.norm_linear(stream, norms, ops.linear(kept(output))))
    assert relative_error(*results) < 0.06


@NEEDS_FP8
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (40, 4096), (3, 14336)])
def test_rows_are_quantized_by_their_largest(rows: int, columns: int) -> None:
    x = rows_of(rows, columns, torch.bfloat16) * torch.logspace(-6, 6, rows, device=DEVICE)[:, None].bfloat16()
    found = rowwise.quantize(x, rowwise.Quantization(None))
    scales = x.float().abs().amax(1) / 448
    torch.testing.assert_close(found.scales, scales)
    assert torch.equal(found.values, (x.float() / scales[:, None]).to(torch.float8_e4m3fn))
    assert not rowwise.quantize(torch.zeros_like(x), rowwise.Quantization(None)).values.float().any()
