"""W8A8 products of 8-bit integers with a scale per row and per output: a GEMV for up to 32 rows, a GEMM in tiles for
more. Reading weights is the limit of the GEMV, arithmetic that of the GEMM. 8B decodes 1.21 times as fast as in bf16
(docs/benchmarks.md); the share of the limit was not measured.

Sums are exact, and scaled once. A few rows are multiplied thread by thread (`mma_ptx`). Either way a row's result is
the same to the bit whatever is beside it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.mma_ptx import mma_s8, places_of_sums, read_rows, read_weights, sum_of_turns
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.rowwise import QuantizedRows
from penstock.model.ops.triton.common.tiling import Tiling, side_by_side
from penstock.model.ops.triton.linear.gemv import Weight

MAX_FEW = 32  # rows
_CHUNK = 128  # columns of a turn


def product(rows: QuantizedRows, weight: Weight, dtype: torch.dtype) -> Tensor:
    """[rows, out], scaled, with the bias if there is one"""
    num_rows, columns = rows.values.shape
    out = torch.empty(num_rows, weight.values.shape[0], dtype=dtype, device=rows.values.device)
    if num_rows <= MAX_FEW and columns % 16 == 0 and has_ptx():
        _few_rows(rows, weight, out)
    else:
        _many_rows(rows, weight, out, tiling_of(num_rows))
    return out


def _few_rows(rows: QuantizedRows, weight: Weight, out: Tensor) -> None:
    num_rows, outputs = out.shape
    columns = weight.values.shape[1]
    tiles = triton.cdiv(outputs, 16)
    turn = min(
        max(2 ** round(math.log2(4096 / tiles)), 2, triton.next_power_of_2(triton.cdiv(columns, 32 * _CHUNK))), 16
    )
    per_program = max(8 // turn, 1)
    _w8a8_gemv_kernel[(triton.cdiv(tiles, per_program),)](
        rows.values,
        weight.values,
        rows.scales,
        weight.scales,
        weight.bias,
        out,
        num_rows,
        outputs,
        COLUMNS=columns,
        HAS_BIAS=weight.bias is not None,
        EIGHTS=triton.cdiv(num_rows, 8),
        TILES=per_program,
        TURN=turn,
        PDL=has_pdl(),
        num_warps=per_program * turn,
        launch_pdl=has_pdl(),
    )


def tiling_of(num_rows: int) -> Tiling:
    if num_rows <= 64:
        return Tiling(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if num_rows <= 128:
        return Tiling(block_m=128, block_n=64, block_k=128, num_warps=4, num_stages=4)
    return Tiling(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4)


def _many_rows(rows: QuantizedRows, weight: Weight, out: Tensor, tiling: Tiling) -> None:
    num_rows, outputs = out.shape
    grid = (triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(outputs, tiling.block_n),)
    _w8a8_gemm_kernel[grid](
        rows.values,
        weight.values,
        rows.scales,
        weight.scales,
        weight.bias,
        out,
        num_rows,
        outputs,
        COLUMNS=weight.values.shape[1],
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )


@triton.jit
def _weights(line, more_line, column, COLUMNS: tl.constexpr):
    column = tl.where(column < COLUMNS, column, 0)  # behind the last, rows are zeros
    return read_weights(line + column, False), read_weights(more_line + column, False)


@triton.jit
def _add_rows(acc, weights, row, inside, column, COLUMNS: tl.constexpr):
    x = read_rows(row + column, inside & (column < COLUMNS))
    return mma_s8(weights[0], weights[1], x, acc)


@triton.jit
def _store(
    acc,
    rows_from,
    num_rows,
    outputs,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,
    TURN: tl.constexpr,
):
    total = sum_of_turns(acc, TURN, TILES).to(tl.float32)
    output, row = places_of_sums(TILES)
    m = rows_from + row
    is_output = output < outputs
    total *= tl.load(row_scales_ptr + m, mask=m < num_rows, other=0.0)
    total *= tl.load(scales_ptr + output, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * outputs + output, total.to(out_ptr.dtype.element_ty), mask=(m < num_rows) & is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _w8a8_gemv_kernel(
    x_ptr,
    weight_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EIGHTS: tl.constexpr,
    TILES: tl.constexpr,
    TURN: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    TURNS: tl.constexpr = (COLUMNS + TURN * 128 - 1) // (TURN * 128)
    thread = tl.arange(0, 32 * TILES * TURN)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    output = (tl.program_id(0) * TILES + warp % TILES) * 16 + g
    line = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64) * COLUMNS
    more_line = weight_ptr + tl.minimum(output + 8, outputs - 1).to(tl.int64) * COLUMNS
    column = warp // TILES * 128 + t * 16
    now, now_high = _weights(line, more_line, column, COLUMNS), _weights(line, more_line, column + 64, COLUMNS)
    ahead = column + TURN * 128
    then, then_high = _weights(line, more_line, ahead, COLUMNS), _weights(line, more_line, ahead + 64, COLUMNS)
    nothing = thread * 0
    first = (nothing, nothing, nothing, nothing)
    second = first
    third = first
    fourth = first
    row = x_ptr + g * COLUMNS
    wait_for_previous(PDL)
    for number in tl.static_range(TURNS):
        first = _add_rows(first, now, row, g < num_rows, column, COLUMNS)
        first = _add_rows(first, now_high, row, g < num_rows, column + 64, COLUMNS)
        if EIGHTS > 1:
            second = _add_rows(second, now, row + 8 * COLUMNS, g + 8 < num_rows, column, COLUMNS)
            second = _add_rows(second, now_high, row + 8 * COLUMNS, g + 8 < num_rows, column + 64, COLUMNS)
        if EIGHTS > 2:
            third = _add_rows(third, now, row + 16 * COLUMNS, g + 16 < num_rows, column, COLUMNS)
            third = _add_rows(third, now_high, row + 16 * COLUMNS, g + 16 < num_rows, column + 64, COLUMNS)
        if EIGHTS > 3:
            fourth = _add_rows(fourth, now, row + 24 * COLUMNS, g + 24 < num_rows, column, COLUMNS)
            fourth = _add_rows(fourth, now_high, row + 24 * COLUMNS, g + 24 < num_rows, column + 64, COLUMNS)
        now, now_high = then, then_high
        if number + 2 < TURNS:
            ahead += TURN * 128
            then, then_high = _weights(line, more_line, ahead, COLUMNS), _weights(line, more_line, ahead + 64, COLUMNS)
        column += TURN * 128
    _store(first, 0, num_rows, outputs, row_scales_ptr, scales_ptr, bias_ptr, out_ptr, HAS_BIAS, TILES, TURN)
    if EIGHTS > 1:
        _store(second, 8, num_rows, outputs, row_scales_ptr, scales_ptr, bias_ptr, out_ptr, HAS_BIAS, TILES, TURN)
    if EIGHTS > 2:
        _store(third, 16, num_rows, outputs, row_scales_ptr, scales_ptr, bias_ptr, out_ptr, HAS_BIAS, TILES, TURN)
    if EIGHTS > 3:
        _store(fourth, 24, num_rows, outputs, row_scales_ptr, scales_ptr, bias_ptr, out_ptr, HAS_BIAS, TILES, TURN)


@triton.jit(do_not_specialize=["num_rows"])
def _w8a8_gemm_kernel(
    x_ptr,
    weight_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    block, part = side_by_side(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N))
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = x_ptr + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * COLUMNS + k[None, :]
    weights = weight_ptr + tl.minimum(n, outputs - 1).to(tl.int64)[None, :] * COLUMNS + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    wait_for_previous(PDL)
    for start in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        if COLUMNS % BLOCK_K == 0:
            acc = tl.dot(tl.load(rows + start), tl.load(weights + start), acc, out_dtype=tl.int32)
        else:
            x = tl.load(rows + start, mask=(start + k < COLUMNS)[None, :], other=0)
            acc = tl.dot(
                x, tl.load(weights + start, mask=(start + k < COLUMNS)[:, None], other=0), acc, out_dtype=tl.int32
            )
    total = acc.to(tl.float32) * tl.load(row_scales_ptr + m, mask=m < num_rows, other=0.0)[:, None]
    total *= tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < outputs)[None, :])
