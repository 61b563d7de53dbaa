"""GEMV and skinny GEMM, for 1 to 16 rows with weights of 16 bits or FP8: every linear while few streams decode. Reading
weights is the limit. All linears of 8B in bf16 reach 96 % of the H200's bandwidth with one row (docs/decisions/0005),
those of 70B in FP8 90 % (docs/benchmarks.md, W1).

Weights are on their way before the kernel that makes the rows is done, and the norm before a product and the epilogue
behind it (SwiGLU, or the sum with the residual stream) are part of it. FP8 has a scale per output; it is widened
exactly, and the rows are not quantized.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops import Norm
from penstock.model.ops.triton.common.device import num_processors
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.rowwise import swiglu
from penstock.model.ops.triton.common.tiling import Tiling

MAX_ROWS = 16
# FP8 widens to float16 exactly, and fastest: rows that meet it become float16 too, and so much smaller that they can.
SHRINK = tl.constexpr(0.0625)
_MAX_BYTES = 32_768  # that a program holds of a weight's row
_WIDE = 4096  # more inputs and outputs than that


TILING = Tiling(block_n=16, block_k=256, split_k=2, num_warps=2, num_stages=4)
FP8_OUTPUTS = 32


class Epilogue(IntEnum):
    """Operation on a product before it is stored."""

    NONE = 0
    ADD = 1  # it is added to what is there
    SWIGLU = 2  # its first half gates its second


@dataclass(frozen=True)
class Weight:
    values: Tensor  # [out, in]
    scales: Tensor | None = None  # [out] float32
    bias: Tensor | None = None


def fits(num_rows: int, weight: Tensor) -> bool:
    if num_rows == 1:
        return True
    if num_rows > MAX_ROWS or weight.dtype is torch.float32:
        return False
    return _divides(_tiling(num_rows, weight), weight)


def _divides(tiling: Tiling, weight: Tensor) -> bool:
    outputs, columns = weight.shape
    return outputs % tiling.block_n == 0 and columns % (tiling.split_k * tiling.block_k) == 0


def _tiling(num_rows: int, weight: Tensor) -> Tiling:
    return TILING if weight.element_size() == 2 else _fp8_tiling(num_rows, weight.shape[0] // FP8_OUTPUTS)


def _fp8_tiling(num_rows: int, num_programs: int) -> Tiling:
    """The more programs share a processor, the less each can read ahead."""
    if num_rows > 8:  # which take as much of the shared memory as the weights
        return Tiling(block_n=FP8_OUTPUTS, block_k=256, split_k=2, num_warps=2, num_stages=4)
    if num_programs <= num_processors():
        return Tiling(block_n=FP8_OUTPUTS, block_k=128, split_k=4, num_warps=4, num_stages=6)
    if num_programs <= 2 * num_processors():
        return Tiling(block_n=FP8_OUTPUTS, block_k=256, split_k=2, num_warps=2, num_stages=5)
    return Tiling(block_n=FP8_OUTPUTS, block_k=128, split_k=4, num_warps=4, num_stages=4)


def can_norm(num_rows: int, weight: Tensor) -> bool:
    """Whether the norm before a product can be part of it."""
    return num_rows == 1 and not _is_wide(weight) and weight.shape[1] * weight.element_size() <= _MAX_BYTES


def _is_wide(weight: Tensor) -> bool:
    """Whether one row is multiplied as several are, by tensor cores: of a wide model, rows of weights are so long that
    a program of `_one_row` has too few of them, and is busier with the norm and with widening FP8 than with reading.

    All linears of a model are wide or none is: the two kernels slow each other down where they alternate, probably
    because what one takes of a processor as shared memory is missing as the cache of the other.
    """
    return weight.element_size() <= 2 and min(weight.shape) > _WIDE and _divides(_tiling(1, weight), weight)


def product(
    x: Tensor,
    weight: Weight,
    *,
    norm: Norm | None = None,
    epilogue: Epilogue = Epilogue.NONE,
    into: Tensor | None = None,
) -> Tensor:
    """x [rows, in], normed if there is a norm, times the weight: [rows, out], or `into` with that added."""
    outputs = weight.values.shape[0] // (2 if epilogue is Epilogue.SWIGLU else 1)
    out = x.new_empty(x.shape[0], outputs) if into is None else into
    launch = _one_row if x.shape[0] == 1 and not _is_wide(weight.values) else _few_rows
    launch(x, weight, norm, epilogue, out)
    return out


def _one_row(x: Tensor, weight: Weight, norm: Norm | None, epilogue: Epilogue, out: Tensor) -> None:
    outputs, columns = out.shape[1], weight.values.shape[1]
    width = weight.values.element_size()
    tile = min(triton.next_power_of_2(columns), _MAX_BYTES // width)
    # In flight, the fastest on an H200: 4 rows of 16-bit weights at 128 bytes a thread, 8 of FP8 at 256; half if long.
    rows, bytes_per_thread = (4, 128) if width == 2 else (8, 256)
    rows //= 1 if tile * width <= 8192 else 2
    warps = rows * tile * width // bytes_per_thread // 32
    rows //= 2 if epilogue is Epilogue.SWIGLU else 1
    _gemv_kernel[(triton.cdiv(outputs, rows),)](
        x,
        norm.weight if norm else None,
        weight.values,
        weight.scales,
        weight.bias,
        out,
        outputs,
        norm.eps if norm else 0.0,
        COLUMNS=columns,
        NORM=norm is not None,
        SCALED=weight.scales is not None,
        HAS_BIAS=weight.bias is not None,
        EPILOGUE=int(epilogue),
        ROW_TILE=rows,
        COLUMN_TILE=tile,
        PDL=has_pdl(),
        num_warps=min(max(warps, 1), 16),
        launch_pdl=has_pdl(),
    )


def _few_rows(x: Tensor, weight: Weight, norm: Norm | None, epilogue: Epilogue, out: Tensor) -> None:
    assert norm is None
    outputs, columns = out.shape[1], weight.values.shape[1]
    tiling = _tiling(x.shape[0], weight.values)
    per_program = tiling.block_n // (2 if epilogue is Epilogue.SWIGLU else 1)
    _skinny_gemm_kernel[(outputs // per_program,)](
        x,
        weight.values,
        weight.scales,
        weight.bias,
        out,
        x.shape[0],
        outputs,
        COLUMNS=columns,
        SCALED=weight.scales is not None,
        HAS_BIAS=weight.bias is not None,
        EPILOGUE=int(epilogue),
        BLOCK_M=8 if x.shape[0] <= 8 else 16,
        BLOCK_N=per_program,
        BLOCK_K=tiling.block_k,
        SPLIT_K=tiling.split_k,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )


@triton.jit
def store_with_epilogue(sums, ups, out, mask, EPILOGUE: tl.constexpr):
    """Sums, rounded where separate kernels round."""
    dtype = out.dtype.element_ty
    result = sums.to(dtype)
    if EPILOGUE == 1:
        result = tl.load(out, mask=mask, other=0.0).to(tl.float32) + result.to(tl.float32)
    if EPILOGUE == 2:
        result = swiglu(result, ups.to(dtype))
    tl.store(out, result.to(dtype), mask=mask)


@triton.jit
def _read(line, column, is_row, COLUMNS: tl.constexpr):
    mask = is_row[:, None] & (column < COLUMNS)[None, :]
    return tl.load(line + column[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _scaled(sums, row, is_row, scales_ptr, bias_ptr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr):
    if SCALED:
        sums *= tl.load(scales_ptr + row, mask=is_row, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _gemv_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    eps,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    is_row = row < outputs
    line = weight_ptr + row.to(tl.int64)[:, None] * COLUMNS
    up_line = line + tl.cast(outputs, tl.int64) * COLUMNS  # cast takes a 1 too, which Triton makes a constant
    column = tl.arange(0, COLUMN_TILE)
    weight = _read(line, column, is_row, COLUMNS)
    if EPILOGUE == 2:
        up = _read(up_line, column, is_row, COLUMNS)
    if NORM:
        norm = tl.load(norm_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + column, mask=column < COLUMNS, other=0.0)
    dtype = x.dtype
    wide = x.to(tl.float32)
    if NORM:
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)
        wide = (norm * wide.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    sums = weight.to(tl.float32) * wide[None, :]
    ups = sums
    if EPILOGUE == 2:
        ups = up.to(tl.float32) * wide[None, :]
    for start in tl.static_range(COLUMN_TILE, COLUMNS, COLUMN_TILE):
        tl.static_assert(not NORM)
        at = start + column
        wide = tl.load(x_ptr + at, mask=at < COLUMNS, other=0.0).to(tl.float32)
        sums += _read(line, at, is_row, COLUMNS).to(tl.float32) * wide[None, :]
        if EPILOGUE == 2:
            ups += _read(up_line, at, is_row, COLUMNS).to(tl.float32) * wide[None, :]
    total = _scaled(tl.sum(sums, axis=1), row, is_row, scales_ptr, bias_ptr, SCALED, HAS_BIAS)
    total_up = total
    if EPILOGUE == 2:
        total_up = _scaled(tl.sum(ups, axis=1), row + outputs, is_row, scales_ptr, bias_ptr, SCALED, HAS_BIAS)
    store_with_epilogue(total, total_up, out_ptr + row, is_row, EPILOGUE)


@triton.jit
def _skinny_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Products [SPLIT_K, outputs, rows]: each warp sums columns of its own."""
    launch_dependents(PDL)
    group = tl.arange(0, SPLIT_K)[:, None, None]
    k = tl.arange(0, BLOCK_K)
    m = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = weight_ptr + output.to(tl.int64)[None, :, None] * COLUMNS + group * BLOCK_K + k[None, None, :]
    column = group * BLOCK_K + k[None, :, None]
    rows = x_ptr + m[None, None, :] * COLUMNS + column
    is_row = (m < num_rows)[None, None, :] & (column >= 0)
    to_up = tl.cast(outputs, tl.int64) * COLUMNS
    acc = tl.zeros([SPLIT_K, BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([SPLIT_K, BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(PDL)
    for start in tl.range(0, COLUMNS, SPLIT_K * BLOCK_K, num_stages=STAGES):
        weight = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(rows + start, mask=is_row, other=0.0)
        if SCALED:
            x = (x.to(tl.float32) * SHRINK).to(tl.float16)
        acc = tl.dot(weight.to(x.dtype), x, acc)
        if EPILOGUE == 2:
            up = tl.load(weights + to_up + start, eviction_policy="evict_first")
            acc_up = tl.dot(up.to(x.dtype), x, acc_up)
    total = tl.trans(tl.sum(acc, axis=0))  # [rows, outputs]
    if SCALED:
        total *= 1 / SHRINK
    total = _scaled(total, output[None, :], True, scales_ptr, bias_ptr, SCALED, HAS_BIAS)
    total_up = total
    if EPILOGUE == 2:
        total_up = tl.trans(tl.sum(acc_up, axis=0))
        if SCALED:
            total_up *= 1 / SHRINK
        total_up = _scaled(total_up, outputs + output[None, :], True, scales_ptr, bias_ptr, SCALED, HAS_BIAS)
    out = out_ptr + m[:, None] * outputs + output[None, :]
    store_with_epilogue(total, total_up, out, (m < num_rows)[:, None] & (output < outputs)[None, :], EPILOGUE)
