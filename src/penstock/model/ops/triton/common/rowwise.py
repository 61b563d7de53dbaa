"""RMSNorm, SwiGLU, and quantization of rows to FP8 or INT8, for any number of rows. Memory's bandwidth is the limit,
and in prefill they reach it (docs/benchmarks.md, W6); with few rows the start of a kernel is, and was not measured.

Every row is its own; intermediate roundings are those of `reference`, so results agree to the bit up to the order of a
sum. The kernel before an 8-bit product writes 8 bits: the largest number of a row becomes the largest that the format
has, unless the checkpoint brings a scale.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops import Norm, Scaled, Stream
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous

FP8 = torch.float8_e4m3fn
_SILU_COLUMNS = 2048  # that one program computes, if rows need not be seen whole


@dataclass(frozen=True)
class Quantization:
    """How activations become small."""

    scale: float | None  # what they are divided by; None: each row by its own
    dtype: torch.dtype = FP8


@dataclass(frozen=True)
class QuantizedRows:
    values: Tensor  # [rows, columns] float8_e4m3fn or int8
    scales: Tensor  # [rows] float32

    @classmethod
    def empty(cls, rows: int, columns: int, quantization: Quantization, device: torch.device) -> QuantizedRows:
        values = torch.empty(rows, columns, dtype=quantization.dtype, device=device)
        return cls(values, torch.empty(rows, device=device))


@overload
def rms_norm(stream: Stream, norm: Norm) -> Tensor: ...
@overload
def rms_norm(stream: Stream, norm: Norm, quantization: Quantization) -> QuantizedRows: ...
def rms_norm(stream: Stream, norm: Norm, quantization: Quantization | None = None) -> Tensor | QuantizedRows:
    """The norm of the stream; what was pending is added to it."""
    residual, pending = stream.residual, stream.pending
    rows, columns = residual.shape
    out = (
        QuantizedRows.empty(rows, columns, quantization, residual.device)
        if quantization
        else torch.empty_like(residual)
    )
    scaled = pending if isinstance(pending, Scaled) else None
    values, scales = (out.values, out.scales) if isinstance(out, QuantizedRows) else (out, None)
    block = triton.next_power_of_2(columns)
    _rms_norm_kernel[(rows,)](
        residual,
        scaled.values if scaled else pending,
        scaled.row_scales if scaled else None,
        scaled.column_scales if scaled else None,
        norm.weight,
        values,
        scales,
        norm.eps,
        _scale(quantization),
        COLUMNS=columns,
        ADD=pending is not None,
        SCALED=scaled is not None,
        QUANTIZE=_kind(quantization),
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=has_pdl(),
    )
    stream.pending = None
    return out


@overload
def silu_mul(gate_up: Tensor) -> Tensor: ...
@overload
def silu_mul(gate_up: Tensor, quantization: Quantization) -> QuantizedRows: ...
def silu_mul(gate_up: Tensor, quantization: Quantization | None = None) -> Tensor | QuantizedRows:
    """[rows, 2 * columns] -> silu(first half) * second half"""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = (
        QuantizedRows.empty(rows, columns, quantization, gate_up.device)
        if quantization
        else gate_up.new_empty(rows, columns)
    )
    values, scales = (out.values, out.scales) if isinstance(out, QuantizedRows) else (out, None)
    block = triton.next_power_of_2(columns) if quantization else _SILU_COLUMNS
    _silu_mul_kernel[(rows, triton.cdiv(columns, block))](
        gate_up,
        values,
        scales,
        _scale(quantization),
        COLUMNS=columns,
        QUANTIZE=_kind(quantization),
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=16 if quantization else 8,
        launch_pdl=has_pdl(),
    )
    return out


def quantize(x: Tensor, quantization: Quantization) -> QuantizedRows:
    rows, columns = x.shape
    out = QuantizedRows.empty(rows, columns, quantization, x.device)
    block = triton.next_power_of_2(columns)
    _quantize_kernel[(rows,)](
        x,
        out.values,
        out.scales,
        _scale(quantization),
        COLUMNS=columns,
        QUANTIZE=_kind(quantization),
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=min(max(block // 512, 1), 16),
        launch_pdl=has_pdl(),
    )
    return out


_NOT, _BY_ROW, _BY_SCALE = 0, 1, 2


def _kind(quantization: Quantization | None) -> int:
    if quantization is None:
        return _NOT
    return _BY_ROW if quantization.scale is None else _BY_SCALE


def _scale(quantization: Quantization | None) -> float:
    return quantization.scale or 0.0 if quantization else 0.0


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, rounded where the reference rounds."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gpt-oss's gate (`ClampedSwiGLU`), rounded once. NaN stays NaN."""
    wide = tl.minimum(gate.to(tl.float32), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    linear = tl.clamp(up.to(tl.float32), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (wide / (1.0 + tl.exp(-ALPHA * wide)) * (linear + 1.0)).to(gate.dtype)


@triton.jit
def _write(x, row, column, inside, out_ptr, scales_ptr, scale, COLUMNS: tl.constexpr, QUANTIZE: tl.constexpr):
    """A row of float32, or a part of one; the whole if it is quantized by its largest."""
    at = row.to(tl.int64) * COLUMNS + column
    if QUANTIZE == 0:
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        IS_INTEGER: tl.constexpr = out_ptr.dtype.element_ty == tl.int8
        LARGEST: tl.constexpr = 127.0 if IS_INTEGER else 448.0
        if QUANTIZE == 1:
            scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / LARGEST
        tl.store(scales_ptr + row, scale)
        shrunk = tl.clamp(x / scale, -LARGEST, LARGEST)
        if IS_INTEGER:
            shrunk += tl.where(shrunk >= 0, 0.5, -0.5)  # to the nearest: what follows cuts off
        tl.store(out_ptr + at, shrunk.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_kernel(
    residual_ptr,
    pending_ptr,
    row_scales_ptr,
    column_scales_ptr,
    weight_ptr,
    out_ptr,
    scales_ptr,
    eps,
    scale,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0)
    start = row.to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(residual_ptr + start + column, mask=inside, other=0.0)
    dtype = x.dtype
    if ADD:
        pending = tl.load(pending_ptr + start + column, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            by_column = tl.load(column_scales_ptr + column, mask=inside, other=0.0)
            pending = (pending * tl.load(row_scales_ptr + row) * by_column).to(dtype).to(tl.float32)
        x = (x.to(tl.float32) + pending).to(dtype)
        tl.store(residual_ptr + start + column, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    result = (weight * normed.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    _write(result, row, column, inside, out_ptr, scales_ptr, scale, COLUMNS, QUANTIZE)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    scales_ptr,
    scale,
    COLUMNS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gates = gate_up_ptr + row.to(tl.int64) * 2 * COLUMNS + column
    wait_for_previous(PDL)
    gate = tl.load(gates, mask=inside, other=0.0)
    up = tl.load(gates + COLUMNS, mask=inside, other=0.0)
    _write(swiglu(gate, up).to(tl.float32), row, column, inside, out_ptr, scales_ptr, scale, COLUMNS, QUANTIZE)


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scales_ptr,
    scale,
    COLUMNS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wait_for_previous(PDL)
    x = tl.load(x_ptr + row.to(tl.int64) * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    _write(x, row, column, inside, out_ptr, scales_ptr, scale, COLUMNS, QUANTIZE)
