"""GEMV for up to 16 rows with weights of 4 and 8 bits in groups of 16 columns (GGUF's Q6_K, Q3_K and Q2_K, and what is
joined with them). Reading weights is the limit; the share was not measured. Interpreted, where there is no inline PTX,
it stands in for `w4a16_gemv` with groups of any size. Experts take the same turns (`w4a16_experts`).

Weights lie as `int4_pack` says, where a product takes 32 columns at a time: two groups. So it is taken twice, each time
with the columns of the other group at zero. Reading weights is what takes time, not that.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.gemv import SHRINK, Epilogue, store_with_epilogue
from penstock.model.ops.triton.linear.int4_pack import (
    PackedWeight,
    columns_of,
    halves,
    part_of,
    per_output,
    read_per_output,
    repeated,
    tile_of,
    zero_of,
)

GROUP = 16


TILING = Tiling(block_n=16, split_k=16, num_warps=8, num_stages=1)  # with SwiGLU as many gates and as many others


def few_rows(x: Tensor, weight: PackedWeight, epilogue: Epilogue, out: Tensor, tiling: Tiling) -> None:
    """out [rows, out], or out with that added, from x [rows, in]."""
    outputs = out.shape[1]
    _q6k_gemv_kernel[(triton.cdiv(outputs, tiling.block_n),)](
        x,
        weight.values,
        weight.scales,
        weight.offsets,
        weight.bias,
        out,
        x.shape[0],
        outputs,
        weight.scales.shape[1],
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=weight.bias is not None,
        EPILOGUE=int(epilogue),
        BLOCK_M=triton.next_power_of_2(max(x.shape[0], 8)),
        TILES=tiling.block_n // 16,
        TURN=tiling.split_k,
        PTX=has_ptx(),
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=has_pdl(),
    )


@triton.jit
def _q6k_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    filled,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    TURN: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums [TURN, outputs, rows]: each warp has chunks of its own. Words are read a turn ahead."""
    launch_dependents(PDL)
    PARTS: tl.constexpr = 16 // BITS
    CHUNKS: tl.constexpr = (COLUMNS + PARTS * 32 - 1) // (PARTS * 32)
    chunk = tl.arange(0, TURN)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    up_tile = tile + outputs // 16
    ahead = read_words(words_ptr, tile, chunk, CHUNKS)
    ahead_up = ahead
    if EPILOGUE == 2:
        ahead_up = read_words(words_ptr, up_tile, chunk, CHUNKS)
    acc = tl.zeros([TURN, 16 * TILES, BLOCK_M], tl.float32)
    acc_up = tl.zeros([TURN, 16 * TILES, BLOCK_M], tl.float32)
    row = tl.arange(0, 8)[:, None] + 8 * tl.arange(0, BLOCK_M // 8)[None, :]
    wait_for_previous(PDL)
    for _ in range(0, CHUNKS, TURN):
        words, words_up = ahead, ahead_up
        ahead = read_words(words_ptr, tile, chunk + TURN, CHUNKS)
        ahead_up = ahead
        if EPILOGUE == 2:
            ahead_up = read_words(words_ptr, up_tile, chunk + TURN, CHUNKS)
        x = read_rows(x_ptr, row, row < num_rows, chunk, COLUMNS, PARTS)
        acc = add_turn(
            acc, words, x, None, chunk, tile, filled, scales_ptr, offsets_ptr, COLUMNS, GROUP, BITS, HAS_OFFSETS, PTX
        )
        if EPILOGUE == 2:
            acc_up = add_turn(
                acc_up,
                words_up,
                x,
                None,
                chunk,
                up_tile,
                filled,
                scales_ptr,
                offsets_ptr,
                COLUMNS,
                GROUP,
                BITS,
                HAS_OFFSETS,
                PTX,
            )
        chunk += TURN
    m = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * 16 * TILES + tl.arange(0, 16 * TILES)
    total, total_up = _total_of(acc, bias_ptr, output, outputs, BITS, HAS_BIAS, x_ptr), acc
    if EPILOGUE == 2:
        total_up = _total_of(acc_up, bias_ptr, output + outputs, 2 * outputs, BITS, HAS_BIAS, x_ptr)
    out = out_ptr + m[:, None] * outputs + output[None, :]
    store_with_epilogue(total, total_up, out, (m < num_rows)[:, None] & (output < outputs)[None, :], EPILOGUE)


@triton.jit
def _total_of(acc, bias_ptr, output, outputs, BITS: tl.constexpr, HAS_BIAS: tl.constexpr, x_ptr):
    """[rows, outputs]"""
    total = tl.trans(tl.sum(acc, axis=0))
    if BITS == 8 and x_ptr.dtype.element_ty != tl.float16:
        total *= 1 / SHRINK
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def read_words(words_ptr, tile, chunk, CHUNKS: tl.constexpr):
    """[chunks, tiles, 2, 128]"""
    place = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    line = words_ptr + tile.to(tl.int64)[None, :, None, None] * (CHUNKS * 256) + place
    chunk = chunk[:, None, None, None]
    return tl.load(line + chunk * 256, mask=chunk < CHUNKS, other=0, eviction_policy="evict_first")


@triton.jit
def read_rows(x_ptr, row, is_row, chunk, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[8, chunks, rows / 8, parts, columns], of rows [8, rows / 8]"""
    part = chunk[None, :, None, None, None] * PARTS + tl.arange(0, PARTS)[None, None, None, :, None]
    column = part * 32 + tl.arange(0, 32)[None, None, None, None, :]
    at = row[:, None, :, None, None] * COLUMNS + column
    return tl.load(x_ptr + at, mask=is_row[:, None, :, None, None] & (column < COLUMNS), other=0.0)


@triton.jit
def read_groups(ptr, chunk, part, half, tile, filled, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Scales or offsets of the groups in which a part of each chunk lies, or half a part. Behind the last, where all
    sums are zero, any will do."""
    group = (chunk * PARTS + part) * 2 + half if GROUP == 16 else (chunk * PARTS + part) * 32 // GROUP
    at = tl.minimum(group, COLUMNS // GROUP - 1)[:, None] * filled + tile[None, :] * 16
    return read_per_output(ptr + at)


@triton.jit
def add_turn(
    acc,
    words,
    x,
    scales,
    chunk,
    tile,
    filled,
    scales_ptr,
    offsets_ptr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Chunk by chunk: acc [chunks, outputs, rows] and the products of words and rows, scaled. The rows' own sums are
    products too, with ones: so they come where the others are. `scales`: of each chunk's first group, or None where
    they were not read ahead."""
    PARTS: tl.constexpr = 16 // BITS
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1
    BFLOAT16: tl.constexpr = BITS == 4 and x.dtype == tl.bfloat16
    E2M1: tl.constexpr = scales_ptr.dtype.element_ty == tl.uint8  # MXFP4: these count from nothing
    TURN: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[2]
    TILES: tl.constexpr = acc.shape[1] // 16
    if BITS == 8 and x.dtype != tl.float16:
        x = (x.to(tl.float32) * SHRINK).to(tl.float16)
    raw, sums = tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
    one = tl.full([TURN, 16, 16], 1.0, x.dtype)
    ones = tl.reshape(tl.join(one, one), [TURN, 16, 32])  # joined as the integers are, for Triton to lay them out so
    # Columns are ordered as `columns_of` has them (h, t, k, c): those of the first group are threads' 0 and 1 (t).
    is_second = (tl.arange(0, 32) // 8 % 2)[None, :, None] == 1
    first, second = halves(x)
    for part in tl.static_range(PARTS):
        if PARTS == 4:
            some, others = halves(first if part < 2 else second)
            columns = some if part % 2 == 0 else others
        else:
            columns = first if part == 0 else second
        columns = columns_of(tl.reshape(columns, [8, TURN, ROWS // 8, 32]), ROWS, TURN)
        for half in tl.static_range(HALVES):
            own = columns
            if HALVES == 2:
                own = tl.where(is_second == (half == 1), columns, tl.zeros_like(columns))
            if not E2M1:
                sums = tl.dot(ones, own, sums)
            raw = tl.dot(tile_of(part_of(words, part, BITS, BFLOAT16, PTX, E2M1), TILES, TURN), own, raw)
            if part == PARTS - 1 or (part + 1) * 32 % GROUP == 0:  # a group may end here
                if scales is None or part * 32 + half * 16 >= GROUP:
                    scales = read_groups(scales_ptr, chunk, part, half, tile, filled, COLUMNS, GROUP, PARTS)
                if not E2M1:
                    raw -= zero_of(BITS, BFLOAT16) * repeated(sums, TILES)
                acc += raw * per_output(scales, ROWS)
                if HAS_OFFSETS:
                    offsets = read_groups(offsets_ptr, chunk, part, half, tile, filled, COLUMNS, GROUP, PARTS)
                    acc += repeated(sums, TILES) * per_output(offsets, ROWS)
                raw, sums = tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
    return acc
