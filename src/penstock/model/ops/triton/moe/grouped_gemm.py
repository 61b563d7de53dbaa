"""Grouped GEMM: products of rows with the experts that they were given, all experts of a layer in one launch, for any
number of rows; weights of 16 bits, FP8 or INT8. With the first tilings, experts in bf16 on an H200
(docs/benchmarks.md): 1 to 64 tokens of Mixtral 97 % of the bandwidth and more, of Qwen3-30B-A3B 67 to 88 %; 2,048
tokens 60 and 38 % of the arithmetic. FP8 and INT8 were not measured with these tilings.

The weights are the left side, so that tiles of them fill the tensor cores however few rows an expert has. With a few
rows a block only reading weights takes time, and each warp sums columns of its own; with many a block is a plain tile.
FP8 and INT8 have a scale per output. They are widened exactly for a few rows; many rows are quantized too. A row's sums
do not depend on the rows beside it, but which kernel and tiling are taken does on how many there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.rowwise import Quantization, clamped_swiglu, quantize, swiglu
from penstock.model.ops.triton.common.tiling import Tiling, side_by_side
from penstock.model.ops.triton.linear.gemv import SHRINK
from penstock.model.ops.triton.moe.routing import Blocks, rows_of_block

_SHRUNK = 2048  # numbers that a program makes so


@dataclass(frozen=True)
class Stack:
    """One linear of every expert."""

    values: Tensor  # [experts, out, in]
    scales: Tensor | None = None  # [experts, out] float32
    bias: Tensor | None = None  # [experts, out]

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    @property
    def is_bytes(self) -> bool:
        return self.values.element_size() == 1


@dataclass(frozen=True)
class Gate:
    """Activation by which a product's first half gates the second: SwiGLU if the limit is 0, else `ClampedSwiGLU`."""

    alpha: float = 1.0
    limit: float = 0.0


SWIGLU = Gate()


def product(
    x: Tensor,
    weight: Stack,
    blocks: Blocks,
    tiling: Tiling,
    *,
    gate: Gate | None,
    dtype: torch.dtype,
    shrinks: bool = False,
) -> Tensor:
    """A row for every pair, from its token's row of x [tokens, in] or from its own of [pairs, in]. With a gate the
    first half of the product gates the second. Activations are of this type; x may be `shrunk`, and what comes of it is
    if `shrinks`. Partial sums along the columns (`split_k`) are for a few rows, and each is a warp's."""
    (tokens, per_token), halves, is_few = blocks.ids.shape, 2 if gate is not None else 1, tiling.split_k > 1
    out = x.new_empty(blocks.pairs, weight.outputs // halves, dtype=torch.float16 if shrinks else dtype)
    row_scales = None
    if weight.is_bytes and is_few:
        x = shrunk(x)
    elif weight.is_bytes:
        rows = quantize(x, Quantization(None, weight.values.dtype))
        x, row_scales = rows.values, rows.scales
    kernel, more = _grouped_gemm_kernel, {}
    if is_few:
        kernel, more = _grouped_gemv_kernel, {"SPLIT_K": tiling.split_k, "IS_SHRUNK": grows(weight, dtype)}
    kernel[(triton.cdiv(weight.outputs, tiling.block_n) * blocks.count,)](
        x,
        row_scales,
        blocks.ids,
        blocks.table,
        blocks.order,
        weight.values,
        weight.scales,
        weight.bias,
        out,
        tokens,
        blocks.count,
        OUTPUTS=weight.outputs // halves,
        COLUMNS=weight.values.shape[2],
        PER_TOKEN=per_token,
        SHARING=blocks.pairs // x.shape[0],
        TOP=triton.next_power_of_2(per_token),
        IS_BYTES=weight.is_bytes,
        HAS_BIAS=weight.bias is not None,
        **gate_constants(gate),
        SHRINKS=shrinks,
        SORTED=blocks.table is not None,
        BLOCK_M=blocks.rows,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        STAGES=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
        **more,
    )
    return out


def gate_constants(gate: Gate | None) -> dict[str, Any]:
    """The gate as constants of a kernel."""
    return {"SWIGLU": gate is not None, "ALPHA": (gate or SWIGLU).alpha, "LIMIT": (gate or SWIGLU).limit}


def grows(weight: Stack, dtype: torch.dtype) -> bool:
    """Whether sums are too small, because rows were shrunk."""
    return weight.is_bytes and dtype is not torch.float16


def shrunk(x: Tensor) -> Tensor:
    """Rows that meet widened bytes: float16, and so much smaller that they can be."""
    if x.dtype is torch.float16:
        return x
    out = torch.empty_like(x, dtype=torch.float16)
    _shrink_kernel[(triton.cdiv(x.numel(), _SHRUNK),)](
        x, out, x.numel(), BLOCK=_SHRUNK, PDL=has_pdl(), num_warps=4, launch_pdl=has_pdl()
    )
    return out


@triton.jit(do_not_specialize=["size"])
def _shrink_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * SHRINK).to(tl.float16), mask=at < size)


@triton.jit
def output_rows(part, OUTPUTS: tl.constexpr, BLOCK_N: tl.constexpr, SWIGLU: tl.constexpr):
    """Which outputs of a weight a program takes: a run of them; with SwiGLU of the gates, and behind them the same of
    the others. And which of those are there."""
    n = tl.arange(0, BLOCK_N)
    if SWIGLU:
        HALF: tl.constexpr = BLOCK_N // 2
        within = part * HALF + n % HALF
        return within + n // HALF * OUTPUTS, within < OUTPUTS
    else:
        return part * BLOCK_N + n, part * BLOCK_N + n < OUTPUTS


@triton.jit
def store_with_swiglu(
    sums,
    bias_ptr,
    out_ptr,
    part,
    expert,
    pair,
    is_row,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHRINKS: tl.constexpr = False,
):
    """sums [outputs, rows], rounded where separate kernels round, go to the rows of their pairs."""
    BLOCK_N: tl.constexpr = sums.shape[0] // 2 if SWIGLU else sums.shape[0]
    if HAS_BIAS:
        output, is_output = output_rows(part, OUTPUTS, sums.shape[0], SWIGLU)
        bias = bias_ptr + expert * (OUTPUTS * (2 if SWIGLU else 1)) + output
        sums += tl.load(bias, mask=is_output, other=0.0).to(tl.float32)[:, None]
    dtype = tl.float32 if SHRINKS else out_ptr.dtype.element_ty
    result = sums.to(dtype)
    if SWIGLU:
        halves = tl.reshape(result, [2, BLOCK_N, sums.shape[1]])
        gate, up = tl.split(tl.permute(halves, [1, 2, 0]))
        result = clamped_swiglu(gate, up, ALPHA, LIMIT) if LIMIT > 0.0 else swiglu(gate, up)
    if SHRINKS:
        result *= SHRINK
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    out = out_ptr + pair.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    tl.store(out, tl.trans(result.to(out_ptr.dtype.element_ty)), mask=is_row[:, None] & (n < OUTPUTS)[None, :])


@triton.jit
def widen_bytes(weight, DTYPE: tl.constexpr):
    if weight.dtype == tl.int8:
        # An exponent is put before the integer, counted from -128: then it stands for 1,024 and that.
        pattern = (weight.to(tl.int16) & 0xFF) ^ 0x6480
        return pattern.to(tl.float16, bitcast=True) - 1152.0
    else:
        return weight.to(DTYPE)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _grouped_gemv_kernel(
    x_ptr,
    row_scales_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    blocks,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARING: tl.constexpr,
    TOP: tl.constexpr,
    IS_BYTES: tl.constexpr,
    IS_SHRUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHRINKS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [SPLIT_K, outputs, rows]: each warp has columns of its own."""
    launch_dependents(PDL)
    PARTS: tl.constexpr = (OUTPUTS * (2 if SWIGLU else 1) + BLOCK_N - 1) // BLOCK_N
    part = tl.program_id(0) % PARTS
    n, is_output = output_rows(part, OUTPUTS, BLOCK_N, SWIGLU)
    k = tl.arange(0, BLOCK_K)
    group = tl.arange(0, SPLIT_K)[:, None, None]
    wait_for_previous(PDL)
    expert, pair, is_row, is_used = rows_of_block(
        ids_ptr, table_ptr, order_ptr, tl.program_id(0) // PARTS, tokens, PER_TOKEN, TOP, BLOCK_M, SORTED
    )
    if not is_used:
        return
    row = pair // SHARING
    first = expert * (OUTPUTS * (2 if SWIGLU else 1))
    weights = weight_ptr + (first + n)[None, :, None] * COLUMNS + group * BLOCK_K + k[None, None, :]
    column = group * BLOCK_K + k[None, :, None]
    rows = x_ptr + row.to(tl.int64)[None, None, :] * COLUMNS + column
    acc = tl.zeros([SPLIT_K, BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, COLUMNS, SPLIT_K * BLOCK_K, num_stages=STAGES):
        if COLUMNS % (SPLIT_K * BLOCK_K) == 0 and OUTPUTS % (BLOCK_N // (2 if SWIGLU else 1)) == 0:
            weight = tl.load(weights + start, eviction_policy="evict_first")
            x = tl.load(rows + start, mask=is_row[None, None, :] & (column >= 0), other=0.0)
        else:
            at = start + group * BLOCK_K + k[None, None, :]
            weight = tl.load(weights + start, mask=is_output[None, :, None] & (at < COLUMNS), other=0.0)
            x = tl.load(rows + start, mask=is_row[None, None, :] & (start + column < COLUMNS), other=0.0)
        acc = tl.dot(widen_bytes(weight, x.dtype), x, acc)
    total = tl.sum(acc, axis=0)
    if IS_BYTES:
        total *= tl.load(scales_ptr + first + n, mask=is_output, other=0.0)[:, None]
    if IS_SHRUNK:
        total *= 1 / SHRINK
    store_with_swiglu(
        total, bias_ptr, out_ptr, part, expert, pair, is_row, OUTPUTS, HAS_BIAS, SWIGLU, ALPHA, LIMIT, SHRINKS
    )


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _grouped_gemm_kernel(
    x_ptr,
    row_scales_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    blocks,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARING: tl.constexpr,
    TOP: tl.constexpr,
    IS_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SHRINKS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [outputs, rows]"""
    launch_dependents(PDL)
    PARTS: tl.constexpr = (OUTPUTS * (2 if SWIGLU else 1) + BLOCK_N - 1) // BLOCK_N
    block, part = side_by_side(tl.program_id(0), blocks, PARTS)
    n, is_output = output_rows(part, OUTPUTS, BLOCK_N, SWIGLU)
    k = tl.arange(0, BLOCK_K)
    wait_for_previous(PDL)
    expert, pair, is_row, is_used = rows_of_block(
        ids_ptr, table_ptr, order_ptr, block, tokens, PER_TOKEN, TOP, BLOCK_M, SORTED
    )
    if not is_used:
        return
    row = pair // SHARING
    first = expert * (OUTPUTS * (2 if SWIGLU else 1))
    weights = weight_ptr + (first + n)[:, None] * COLUMNS + k[None, :]
    rows = x_ptr + row.to(tl.int64)[None, :] * COLUMNS + k[:, None]
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, BLOCK_M], SUM)
    for start in tl.range(0, COLUMNS, BLOCK_K, num_stages=STAGES):
        if COLUMNS % BLOCK_K == 0 and OUTPUTS % (BLOCK_N // (2 if SWIGLU else 1)) == 0:
            weight = tl.load(weights + start)
            x = tl.load(rows + start, mask=is_row[None, :], other=0.0)
        else:
            weight = tl.load(weights + start, mask=is_output[:, None] & (start + k < COLUMNS)[None, :], other=0.0)
            x = tl.load(rows + start, mask=is_row[None, :] & (start + k < COLUMNS)[:, None], other=0.0)
        acc = tl.dot(weight, x, acc, input_precision="ieee", out_dtype=SUM)
    total = acc.to(tl.float32)
    if IS_BYTES:
        total *= tl.load(scales_ptr + first + n, mask=is_output, other=0.0)[:, None]
        total *= tl.load(row_scales_ptr + row, mask=is_row, other=0.0)[None, :]
    store_with_swiglu(
        total, bias_ptr, out_ptr, part, expert, pair, is_row, OUTPUTS, HAS_BIAS, SWIGLU, ALPHA, LIMIT, SHRINKS
    )
