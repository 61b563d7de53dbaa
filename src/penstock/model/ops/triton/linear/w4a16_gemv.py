"""GEMV for up to 16 rows with weights of 4 and 8 bits in groups of 32 columns and more (W4A16, W8A16), thread by thread
with inline PTX (`mma_ptx`). Reading weights is the limit: the linears of 8B in 4 bits reach 51 % of the H200's
bandwidth with one row; between stand starts and ends of short kernels (docs/benchmarks.md, docs/decisions/0011).

Weights go from memory to the tensor cores through registers alone (`int4_pack`). The warps of a tile of 16 outputs take
turns at its chunks and add up at the end; the epilogue is part of it. A short product is on its way before the rows are
there; a long one rather has many warps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.mma_ptx import (
    mma,
    places_of_sums,
    read_rows,
    read_weights,
    shrunk_to_float16,
    sum_of_turns,
    widen,
)
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.gemv import SHRINK, Epilogue, store_with_epilogue
from penstock.model.ops.triton.linear.int4_pack import PackedWeight

_MAX_TURNS = 32  # of a warp, which are one straight run of instructions
_SHORT = 64  # chunks


def tiling_of(weight: PackedWeight, epilogue: Epilogue) -> Tiling:
    """Chosen on an H200: some thousand warps in all, and not too few turns for each. With SwiGLU half of the outputs
    are gates."""
    tiles, chunks, _, _ = weight.values.shape
    is_short = chunks <= _SHORT
    wanted = (2048 if is_short else 4096) / tiles
    turn = min(max(2 ** round(math.log2(wanted)), 2, triton.next_power_of_2(triton.cdiv(chunks, _MAX_TURNS))), 16)
    if turn == 2:
        return Tiling(block_n=64, num_warps=8, num_stages=3)
    gated = 2 if epilogue is Epilogue.SWIGLU else 1
    return Tiling(block_n=16 * gated, num_warps=gated * turn, num_stages=4 if is_short else 3)


def few_rows(x: Tensor, weight: PackedWeight, epilogue: Epilogue, out: Tensor, tiling: Tiling) -> None:
    """out [rows, out], or out with that added, from x [rows, in]."""
    outputs = out.shape[1]
    per_program = tiling.block_n // (2 if epilogue is Epilogue.SWIGLU else 1)
    _w4a16_gemv_kernel[(triton.cdiv(outputs, per_program),)](
        x,
        weight.values,
        weight.scales,
        weight.offsets,
        weight.bias,
        out,
        x.shape[0],
        outputs,
        weight.scales.shape[1],
        0,
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        HAS_BIAS=weight.bias is not None,
        EPILOGUE=int(epilogue),
        EIGHTS=triton.cdiv(x.shape[0], 8),
        TILES=tiling.block_n // 16,
        WARPS=tiling.num_warps,
        AHEAD=tiling.num_stages,
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )


@triton.jit
def _turn(
    words, scales, chunk, filled, GROUP: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """All that a chunk needs from afar: its words, and the scales of its first group for two outputs."""
    chunk = tl.minimum(chunk, (COLUMNS + CHUNK - 1) // CHUNK - 1)  # behind the last, rows are zeros
    at = words + chunk * 256
    a, b, c, d = read_weights(at, EARLY)
    e, f, g, h = read_weights(at + 128, EARLY)
    line = scales + (chunk * CHUNK // GROUP) * filled
    return a, b, c, d, e, f, g, h, tl.load(line).to(tl.float32), tl.load(line + 1).to(tl.float32)


@triton.jit
def _columns(row, inside, column, SHRINKS: tl.constexpr, COLUMNS: tl.constexpr):
    a, b, c, d = read_rows(row + column, inside & (column < COLUMNS))
    if SHRINKS:
        a, b, c, d = shrunk_to_float16(a), shrunk_to_float16(b), shrunk_to_float16(c), shrunk_to_float16(d)
    return a, b, c, d


@triton.jit
def _rows(
    row, inside, chunk, t, zero, BITS: tl.constexpr, SHRINKS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """A thread's columns of a chunk, part by part."""
    at = chunk * (512 // BITS) + t * 8
    first = _columns(row, inside, at, SHRINKS, COLUMNS)
    second = _columns(row, inside, at + 32, SHRINKS, COLUMNS)
    third, fourth = first, second
    if BITS == 4:
        third = _columns(row, inside, at + 64, SHRINKS, COLUMNS)
        fourth = _columns(row, inside, at + 96, SHRINKS, COLUMNS)
    if EARLY:  # all are read at once if the first product needs all; what is zero, the assembler does not know
        late = (second[3] | third[3] | fourth[3]) & zero
        first = (first[0] | late, first[1], first[2], first[3])
    return first, second, third, fourth


@triton.jit
def _scaled(acc, raw, first, second):
    return acc[0] + raw[0] * first, acc[1] + raw[1] * first, acc[2] + raw[2] * second, acc[3] + raw[3] * second


@triton.jit
def _add_chunk(
    acc,
    turn,
    x,
    chunk,
    scales,
    offsets,
    filled,
    nothing,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BFLOAT16: tl.constexpr,
):
    PARTS: tl.constexpr = 16 // BITS
    raw = (nothing, nothing, nothing, nothing)
    sums = raw  # of the rows themselves: products with ones
    one = tl.full(nothing.shape, 0x3F803F80 if BFLOAT16 else 0x3C003C00, tl.int32)
    first, second = turn[8], turn[9]
    for part in tl.static_range(PARTS):
        columns = x[part]
        low = widen(turn[0], turn[1], turn[2], turn[3], part, BITS, BFLOAT16)
        raw = mma(low, columns[0], columns[1], raw, BFLOAT16)
        high = widen(turn[4], turn[5], turn[6], turn[7], part, BITS, BFLOAT16)
        raw = mma(high, columns[2], columns[3], raw, BFLOAT16)
        if HAS_OFFSETS:
            sums = mma((one, one, one, one), columns[0], columns[1], sums, BFLOAT16)
            sums = mma((one, one, one, one), columns[2], columns[3], sums, BFLOAT16)
        if part == PARTS - 1 or (part + 1) * 32 % GROUP == 0:  # a group may end here
            group = tl.minimum((chunk * PARTS + part) * 32 // GROUP, COLUMNS // GROUP - 1)
            if part * 32 >= GROUP:
                first = tl.load(scales + group * filled).to(tl.float32)
                second = tl.load(scales + group * filled + 1).to(tl.float32)
            acc = _scaled(acc, raw, first, second)
            if HAS_OFFSETS:
                to_first = tl.load(offsets + group * filled).to(tl.float32)
                to_second = tl.load(offsets + group * filled + 1).to(tl.float32)
                acc = _scaled(acc, sums, to_first, to_second)
            raw = (nothing, nothing, nothing, nothing)
            sums = raw
    return acc


@triton.jit
def _store(
    total,
    rows_from,
    num_rows,
    outputs,
    bias_ptr,
    out_ptr,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    GROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    OWN: tl.constexpr = TILES // 2 if EPILOGUE == 2 else TILES
    if GROWS:
        total *= 1 / SHRINK
    total_up = total
    if EPILOGUE == 2:
        total, total_up = tl.split(tl.trans(tl.reshape(total, [2, OWN * 128])))
    output, row = places_of_sums(OWN)
    m = rows_from + row
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)
        if EPILOGUE == 2:
            total_up += tl.load(bias_ptr + outputs + output, mask=output < outputs, other=0.0).to(tl.float32)
    store_with_epilogue(total, total_up, out_ptr + m * outputs + output, (m < num_rows) & (output < outputs), EPILOGUE)


@triton.jit(do_not_specialize=["num_rows", "zero"])
def _w4a16_gemv_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    outputs,
    filled,
    zero,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    EIGHTS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    CHUNK: tl.constexpr = 512 // BITS
    CHUNKS: tl.constexpr = (COLUMNS + CHUNK - 1) // CHUNK
    TURN: tl.constexpr = WARPS // TILES
    TURNS: tl.constexpr = (CHUNKS + TURN - 1) // TURN
    EARLY: tl.constexpr = AHEAD == 4
    BFLOAT16: tl.constexpr = BITS == 4 and x_ptr.dtype.element_ty == tl.bfloat16
    SHRINKS: tl.constexpr = BITS == 8 and x_ptr.dtype.element_ty == tl.bfloat16
    thread = tl.arange(0, 32 * WARPS)
    g, t, warp = thread % 32 // 4, thread % 4, thread // 32
    own, chunk = warp % TILES, warp // TILES
    if EPILOGUE == 2:  # gates, and what they gate
        tile = tl.program_id(0) * (TILES // 2) + own % (TILES // 2) + own // (TILES // 2) * (outputs // 16)
    else:
        tile = tl.program_id(0) * TILES + own
    words = words_ptr + tile.to(tl.int64) * (CHUNKS * 256) + thread % 32 * 4
    scales = scales_ptr + tile * 16 + g * 2
    offsets = scales
    if HAS_OFFSETS:
        offsets = offsets_ptr + tile * 16 + g * 2
    now = _turn(words, scales, chunk, filled, GROUP, CHUNK, COLUMNS, EARLY)
    then = _turn(words, scales, chunk + TURN, filled, GROUP, CHUNK, COLUMNS, EARLY)
    later = _turn(words, scales, chunk + 2 * TURN, filled, GROUP, CHUNK, COLUMNS, EARLY)
    last = later
    if EARLY:
        last = _turn(words, scales, chunk + 3 * TURN, filled, GROUP, CHUNK, COLUMNS, EARLY)
    nothing = tl.zeros([32 * WARPS], tl.float32)
    acc = (nothing, nothing, nothing, nothing)
    acc_more = acc
    row = x_ptr + g * COLUMNS
    wait_for_previous(PDL)
    for number in tl.static_range(TURNS):
        x = _rows(row, g < num_rows, chunk, t, zero, BITS, SHRINKS, COLUMNS, EARLY)
        acc = _add_chunk(
            acc, now, x, chunk, scales, offsets, filled, nothing, COLUMNS, GROUP, BITS, HAS_OFFSETS, BFLOAT16
        )
        if EIGHTS == 2:
            x = _rows(row + 8 * COLUMNS, g + 8 < num_rows, chunk, t, zero, BITS, SHRINKS, COLUMNS, EARLY)
            acc_more = _add_chunk(
                acc_more, now, x, chunk, scales, offsets, filled, nothing, COLUMNS, GROUP, BITS, HAS_OFFSETS, BFLOAT16
            )
        now = then
        then = later
        later = last
        if number + AHEAD < TURNS:
            last = _turn(words, scales, chunk + AHEAD * TURN, filled, GROUP, CHUNK, COLUMNS, EARLY)
            if not EARLY:
                later = last
        chunk += TURN
    _store(sum_of_turns(acc, TURN, TILES), 0, num_rows, outputs, bias_ptr, out_ptr, HAS_BIAS, EPILOGUE, SHRINKS, TILES)
    if EIGHTS == 2:
        _store(
            sum_of_turns(acc_more, TURN, TILES),
            8,
            num_rows,
            outputs,
            bias_ptr,
            out_ptr,
            HAS_BIAS,
            EPILOGUE,
            SHRINKS,
            TILES,
        )
