"""Norms and SwiGLU. Every row is its own; intermediate roundings are those of `reference`, so results agree to the bit
up to the order of a sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_SILU_COLUMNS = 2048  # that one program computes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch_norm(x, None, weight, eps, out)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    _launch_norm(x, residual, weight, eps, out)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    grid = (rows, triton.cdiv(columns, _SILU_COLUMNS))
    _silu_mul_kernel[grid](gate_up, out, COLUMNS=columns, BLOCK=_SILU_COLUMNS, num_warps=8)
    return out


def _launch_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
    assert x.is_contiguous()
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 512, 1), 16)  # 16 numbers a thread
    _rms_norm_kernel[(rows,)](
        x, residual, weight, out, eps, COLUMNS=columns, ADD=residual is not None, BLOCK=block, num_warps=warps
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps, COLUMNS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + start + column, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype
        )
        tl.store(residual_ptr + start + column, x, mask=inside)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
    tl.store(out_ptr + start + column, weight * normed.to(x.dtype).to(tl.float32), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    gate = tl.load(gate_up_ptr + row * 2 * COLUMNS + column, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * COLUMNS + COLUMNS + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * COLUMNS + column, silu.to(tl.float32) * up.to(tl.float32), mask=inside)
