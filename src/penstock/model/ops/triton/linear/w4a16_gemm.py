"""GEMM for 17 to 512 rows with weights of 4 and 8 bits in groups (W4A16, W8A16), and their dequantization for more rows
and for embeddings. Reading weights is the limit at first, then arithmetic; tested, not tuned and not measured
(docs/benchmarks.md).

Up to some hundreds of rows a tile of the weight is widened in registers on its way to the tensor cores. For more the
whole weight is widened once, and the product is cuBLAS's: next to its time the widening is short.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.gemv import SHRINK
from penstock.model.ops.triton.linear.int4_pack import (
    OUTPUTS,
    SPAN,
    PackedWeight,
    in_packed_order,
    per_column,
    per_output,
    read_per_output,
    wide_tile_of,
    zero_of,
)


def many_rows(x: Tensor, weight: PackedWeight, tiling: Tiling) -> Tensor:
    """x [rows, in] times the weight: [rows, out]"""
    assert OUTPUTS % tiling.block_n == 0
    num_rows, outputs = x.shape[0], weight.outputs
    out = x.new_empty(num_rows, outputs)
    if weight.bits == 8 and x.dtype is torch.bfloat16:
        x = (x * SHRINK.value).to(torch.float16)
    grid = (triton.cdiv(num_rows, tiling.block_m) * triton.cdiv(outputs, tiling.block_n),)
    _w4a16_gemm_kernel[grid](
        in_packed_order(x),
        weight.values,
        weight.scales,
        weight.offsets,
        sums_of(x, SPAN * 16 // weight.bits),
        weight.bias,
        out,
        num_rows,
        outputs,
        weight.scales.shape[1],
        1.0 if x.dtype is out.dtype else 1 / SHRINK.value,
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=weight.bias is not None,
        BLOCK_M=tiling.block_m,
        TILES=tiling.block_n // 16,
        STAGES=tiling.num_stages,
        PTX=has_ptx(),
        num_warps=tiling.num_warps,
    )
    return out


def sums_of(x: Tensor, unit: int) -> Tensor:
    """Sums of every `unit` columns."""
    filled = F.pad(x, (0, -x.shape[1] % unit))
    return filled.view(x.shape[0], -1, unit).sum(2, dtype=torch.float32)


def dequantized(weight: PackedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """[out, in] in a float type; or [ids, in], the outputs of those numbers."""
    rows = weight.outputs if ids is None else ids.shape[0]
    out = torch.empty(rows, weight.columns, dtype=dtype, device=weight.values.device)
    block = min(triton.next_power_of_2(weight.columns), 4096)
    _dequantize_kernel[(rows, triton.cdiv(weight.columns, block))](
        weight.values,
        weight.scales,
        weight.offsets,
        ids,
        out,
        weight.scales.shape[1],
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_IDS=ids is not None,
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=4,
        launch_pdl=has_pdl(),
    )
    return out


@triton.jit
def multiply_chunks(
    x_ptr,
    row,
    is_row,
    words_ptr,
    tile,
    scales_ptr,
    offsets_ptr,
    line,
    filled,
    sums_ptr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums [outputs, rows] of rows [BLOCK_M] and tiles [TILES] of 16 outputs. `line` [TILES]: where the first group's
    scales of each tile begin."""
    CHUNK: tl.constexpr = 16 // BITS * 32
    CHUNKS: tl.constexpr = (COLUMNS + CHUNK - 1) // CHUNK
    PADDED: tl.constexpr = (COLUMNS + 31) // 32 * 32
    BFLOAT16: tl.constexpr = BITS == 4 and x_ptr.dtype.element_ty == tl.bfloat16
    E2M1: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8  # MXFP4
    k = tl.arange(0, CHUNK)
    place = tl.arange(0, 2)[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    words = words_ptr + tile[:, None, None] * (CHUNKS * 256) + place
    rows = x_ptr + row[None, :] * PADDED + k[:, None]
    acc = tl.zeros([16 * TILES, BLOCK_M], tl.float32)
    ahead = tl.load(words)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        pairs = ahead
        ahead = tl.load(words + tl.minimum(chunk + 1, CHUNKS - 1) * 256)
        inside = is_row[None, :] & (chunk * CHUNK + k < PADDED)[:, None]
        x = tl.load(rows + chunk * CHUNK, mask=inside, other=0.0)
        weight = wide_tile_of(pairs, TILES, BITS, BFLOAT16, PTX, E2M1)
        if E2M1:  # a power of two for each group: weights are scaled, and it costs them nothing
            group = tl.minimum(chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP), COLUMNS // GROUP - 1)
            scales = read_per_output(scales_ptr + group[:, None] * filled + line[None, :])
            acc = tl.dot(weight * per_column(scales, x.dtype), x, acc)
        else:
            raw = tl.dot(weight, x)
            at = (chunk * CHUNK // GROUP * filled + line)[None, :]
            scale = tl.reshape(per_output(read_per_output(scales_ptr + at), BLOCK_M), [16 * TILES, BLOCK_M])
            sums = tl.load(sums_ptr + row * CHUNKS + chunk, mask=is_row, other=0.0)[None, :]
            acc += (raw - sums * zero_of(BITS, BFLOAT16)) * scale
            if HAS_OFFSETS:
                offset = per_output(read_per_output(offsets_ptr + at), BLOCK_M)
                acc += sums * tl.reshape(offset, [16 * TILES, BLOCK_M])
    return acc


@triton.jit
def _w4a16_gemm_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    sums_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    filled,
    grow,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Programs that read the same weights run side by side."""
    row_blocks = tl.cdiv(num_rows, BLOCK_M)
    program = tl.program_id(0)
    m = (program % row_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = (program // row_blocks) * TILES + tl.arange(0, TILES)
    acc = multiply_chunks(
        x_ptr,
        m.to(tl.int64),
        m < num_rows,
        words_ptr,
        tile.to(tl.int64),
        scales_ptr,
        offsets_ptr,
        tile * 16,
        filled,
        sums_ptr,
        COLUMNS,
        GROUP,
        BITS,
        HAS_OFFSETS,
        BLOCK_M,
        TILES,
        STAGES,
        PTX,
    )
    n = (program // row_blocks) * TILES * 16 + tl.arange(0, 16 * TILES)
    acc *= grow
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < outputs)[None, :])


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scales_ptr,
    offsets_ptr,
    ids_ptr,
    out_ptr,
    filled,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    PARTS: tl.constexpr = 16 // BITS
    CHUNKS: tl.constexpr = (COLUMNS + PARTS * 32 - 1) // (PARTS * 32)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    wait_for_previous(PDL)
    output = tl.load(ids_ptr + row).to(tl.int64) if HAS_IDS else row
    part = column // 32 % PARTS
    t, k, h, c = column // 8 % 4, column // 4 % 2, column // 2 % 2, column % 2
    word = k * 256 + (output % 8) * 32 + t * 8 + h * 4 + (output // 8 % 2) * 2 + c
    line = words_ptr + (output // 16 * CHUNKS + column // (32 * PARTS)) * 256
    pairs = tl.load(line + word // 2, mask=inside, other=0)
    integers = ((pairs >> (16 * c + BITS * part)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
    at = column // GROUP * filled + output // 16 * 16 + output % 8 * 2 + output // 8 % 2
    wide = integers.to(tl.float32) * tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        wide += tl.load(offsets_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * COLUMNS + column, wide.to(out_ptr.dtype.element_ty), mask=inside)
