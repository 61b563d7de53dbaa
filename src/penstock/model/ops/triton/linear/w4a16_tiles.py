"""Products of a few rows with weights of 4- and 8-bit integers in groups.

Weights go from memory to the tensor cores through registers alone (see `int4_pack`), and are on their way before the
rows are there. The epilogue is part of it. Integers meet the activations as they are, exactly, and a group's sum
is scaled: no precision is lost to 16-bit weights.
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
    tile_of,
    zero_of,
)

MAX_ROWS = 16


def few_rows(x: Tensor, weight: PackedWeight, epilogue: Epilogue, out: Tensor, tiling: Tiling) -> None:
    """out [rows, out], or out with that added, from x [rows, in]."""
    outputs = out.shape[1]
    per_program = tiling.block_n // (2 if epilogue is Epilogue.SWIGLU else 1)
    _w4a16_tiles_kernel[(triton.cdiv(outputs, per_program),)](
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
        TILES=per_program // 16,
        TURN=tiling.split_k,
        PTX=has_ptx(),
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )


@triton.jit
def read_words(words, chunk, CHUNKS: tl.constexpr):
    return tl.load(words + chunk * 256, mask=chunk < CHUNKS, other=0, eviction_policy="evict_first")


@triton.jit
def read_rows(x_ptr, chunk, num_rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[8, chunks, rows / 8, parts, columns]"""
    part = chunk[None, :, None, None, None] * PARTS + tl.arange(0, PARTS)[None, None, None, :, None]
    column = part * 32 + tl.arange(0, 32)[None, None, None, None, :]
    row = (tl.arange(0, 8)[:, None] + 8 * tl.arange(0, ROWS // 8)[None, :])[:, None, :, None, None]
    return tl.load(x_ptr + row * COLUMNS + column, mask=(row < num_rows) & (column < COLUMNS), other=0.0)


@triton.jit
def read_groups(ptr, chunk, part, tile, filled, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Scales or offsets of the groups in which a part of each chunk lies. Behind the last, where all sums are zero, any
    will do."""
    group = tl.minimum((chunk * PARTS + part) * 32 // GROUP, COLUMNS // GROUP - 1)
    return read_per_output(ptr + group[:, None] * filled + tile[None, :] * 16)


@triton.jit
def _w4a16_tiles_kernel(
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
    """Sums [TURN, outputs, rows]: each warp has chunks of its own. All that a turn needs is read a turn ahead."""
    launch_dependents(PDL)
    PARTS: tl.constexpr = 16 // BITS
    CHUNKS: tl.constexpr = (COLUMNS + PARTS * 32 - 1) // (PARTS * 32)
    BLOCK_N: tl.constexpr = 16 * TILES
    chunk = tl.arange(0, TURN)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    up_tile = tile + outputs // 16
    place = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    words = words_ptr + tile.to(tl.int64)[None, :, None, None] * (CHUNKS * 256) + place
    to_up = tl.cast(outputs // 16, tl.int64) * (CHUNKS * 256)
    ahead = read_words(words, chunk[:, None, None, None], CHUNKS)
    scales = read_groups(scales_ptr, chunk, 0, tile, filled, COLUMNS, GROUP, PARTS)
    ahead_up, scales_up = ahead, scales
    if EPILOGUE == 2:
        ahead_up = read_words(words + to_up, chunk[:, None, None, None], CHUNKS)
        scales_up = read_groups(scales_ptr, chunk, 0, up_tile, filled, COLUMNS, GROUP, PARTS)
    acc = tl.zeros([TURN, BLOCK_N, BLOCK_M], tl.float32)
    acc_up = tl.zeros([TURN, BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(PDL)
    for _ in tl.static_range(0, CHUNKS, TURN):
        after = chunk + TURN
        next_words = read_words(words, after[:, None, None, None], CHUNKS)
        next_scales = read_groups(scales_ptr, after, 0, tile, filled, COLUMNS, GROUP, PARTS)
        next_up, next_scales_up = next_words, next_scales
        if EPILOGUE == 2:
            next_up = read_words(words + to_up, after[:, None, None, None], CHUNKS)
            next_scales_up = read_groups(scales_ptr, after, 0, up_tile, filled, COLUMNS, GROUP, PARTS)
        x = read_rows(x_ptr, chunk, num_rows, BLOCK_M, COLUMNS, PARTS)
        acc, acc_up = add_turn(
            acc,
            acc_up,
            ahead,
            ahead_up,
            x,
            scales,
            scales_up,
            chunk,
            tile,
            up_tile,
            filled,
            scales_ptr,
            offsets_ptr,
            COLUMNS,
            GROUP,
            BITS,
            HAS_OFFSETS,
            EPILOGUE,
            PTX,
        )
        chunk, ahead, ahead_up, scales, scales_up = after, next_words, next_up, next_scales, next_scales_up
    m = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total, total_up = total_of(acc, bias_ptr, output, outputs, BITS, HAS_BIAS, x_ptr), acc
    if EPILOGUE == 2:
        total_up = total_of(acc_up, bias_ptr, output + outputs, 2 * outputs, BITS, HAS_BIAS, x_ptr)
    out = out_ptr + m[:, None] * outputs + output[None, :]
    store_with_epilogue(total, total_up, out, (m < num_rows)[:, None] & (output < outputs)[None, :], EPILOGUE)


@triton.jit
def add_turn(
    acc,
    acc_up,
    words,
    words_up,
    x,
    scales,
    scales_up,
    chunk,
    tile,
    up_tile,
    filled,
    scales_ptr,
    offsets_ptr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Chunk by chunk: acc [chunks, outputs, rows] and the products of words and rows, scaled. The rows' own sums are
    products too, with ones: so they come where the others are."""
    PARTS: tl.constexpr = 16 // BITS
    BFLOAT16: tl.constexpr = BITS == 4 and x.dtype == tl.bfloat16
    TURN: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[2]
    TILES: tl.constexpr = acc.shape[1] // 16
    if BITS == 8 and x.dtype != tl.float16:
        x = (x.to(tl.float32) * SHRINK).to(tl.float16)
    raw, raw_up, sums = tl.zeros_like(acc), tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
    one = tl.full([TURN, 16, 16], 1.0, x.dtype)
    ones = tl.reshape(tl.join(one, one), [TURN, 16, 32])  # joined as the integers are, for Triton to lay them out so
    first, second = halves(x)
    for part in tl.static_range(PARTS):
        if PARTS == 4:
            some, others = halves(first if part < 2 else second)
            columns = some if part % 2 == 0 else others
        else:
            columns = first if part == 0 else second
        columns = columns_of(tl.reshape(columns, [8, TURN, ROWS // 8, 32]), ROWS, TURN)
        sums = tl.dot(ones, columns, sums)
        raw = tl.dot(tile_of(part_of(words, part, BITS, BFLOAT16, PTX), TILES, TURN), columns, raw)
        if EPILOGUE == 2:
            raw_up = tl.dot(tile_of(part_of(words_up, part, BITS, BFLOAT16, PTX), TILES, TURN), columns, raw_up)
        if part == PARTS - 1 or (part + 1) * 32 % GROUP == 0:  # a group may end here
            if part * 32 >= GROUP:
                scales = read_groups(scales_ptr, chunk, part, tile, filled, COLUMNS, GROUP, PARTS)
                if EPILOGUE == 2:
                    scales_up = read_groups(scales_ptr, chunk, part, up_tile, filled, COLUMNS, GROUP, PARTS)
            acc += (raw - zero_of(BITS, BFLOAT16) * repeated(sums, TILES)) * per_output(scales, ROWS)
            if EPILOGUE == 2:
                acc_up += (raw_up - zero_of(BITS, BFLOAT16) * repeated(sums, TILES)) * per_output(scales_up, ROWS)
            if HAS_OFFSETS:
                offsets = read_groups(offsets_ptr, chunk, part, tile, filled, COLUMNS, GROUP, PARTS)
                acc += repeated(sums, TILES) * per_output(offsets, ROWS)
                if EPILOGUE == 2:
                    offsets = read_groups(offsets_ptr, chunk, part, up_tile, filled, COLUMNS, GROUP, PARTS)
                    acc_up += repeated(sums, TILES) * per_output(offsets, ROWS)
            raw, raw_up, sums = tl.zeros_like(acc), tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
    return acc, acc_up


@triton.jit
def repeated(sums, TILES: tl.constexpr):
    """[chunks, 16, rows] -> [chunks, outputs, rows]"""
    TURN: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[2]
    return tl.reshape(tl.broadcast_to(sums[:, None, :, :], [TURN, TILES, 16, ROWS]), [TURN, 16 * TILES, ROWS])


@triton.jit
def total_of(acc, bias_ptr, output, outputs, BITS: tl.constexpr, HAS_BIAS: tl.constexpr, x_ptr):
    """[rows, outputs]"""
    total = tl.trans(tl.sum(acc, axis=0))
    if BITS == 8 and x_ptr.dtype.element_ty != tl.float16:
        total *= 1 / SHRINK
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    return total
