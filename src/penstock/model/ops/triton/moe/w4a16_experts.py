"""Grouped GEMM with experts of 4 and 8 bits in groups (W4A16), for any number of rows: a GEMV for blocks of up to 16
rows, a GEMM for larger ones. The share of the limit was not measured (times of an earlier state: docs/benchmarks.md).

Weights lie as `int4_pack` says, one expert behind the other. Which rows a program has is `routing`'s affair.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear.gemv import SHRINK
from penstock.model.ops.triton.linear.int4_pack import (
    SPAN,
    columns_of,
    halves,
    in_packed_order,
    part_of,
    per_output,
    read_per_output,
    repeated,
    tile_of,
    zero_of,
)
from penstock.model.ops.triton.linear.w4a16_gemm import multiply_chunks, sums_of
from penstock.model.ops.triton.moe.grouped_gemm import shrunk, side_by_side, store_with_swiglu
from penstock.model.ops.triton.moe.routing import Blocks, rows_of_block
from penstock.model.quantized.grouped import Bits

TILE = 16  # outputs


@dataclass(frozen=True)
class PackedStack:
    """One linear of every expert. As `PackedWeight`, with the experts first."""

    values: Tensor  # [experts, out / 16, chunks, 2, 128] int32
    scales: Tensor  # [experts, groups, out]
    offsets: Tensor | None  # the same
    order: Tensor | None  # [experts, in] int32: of the columns, if they are not stored as they come
    bits: Bits
    outputs: int
    columns: int

    @property
    def group_size(self) -> int:
        return self.columns // int(self.scales.shape[1])

    @property
    def fits_gemm(self) -> bool:
        """A chunk must lie within a group."""
        return self.group_size == self.columns or self.group_size % (SPAN * 16 // self.bits) == 0


def few_rows(x: Tensor, weight: PackedStack, blocks: Blocks, tiling: Tiling, *, swiglu: bool) -> Tensor:
    """See `grouped_gemm.product`."""
    tokens, per_token = blocks.ids.shape
    outputs = weight.outputs // (2 if swiglu else 1)
    out = x.new_empty(blocks.pairs, outputs)
    grow = 1.0
    if weight.bits == 8 and x.dtype is not torch.float16:
        x, grow = shrunk(x), 1 / SHRINK.value
    _w4a16_grouped_gemv_kernel[(triton.cdiv(weight.outputs, tiling.block_n) * blocks.count,)](
        x,
        blocks.ids,
        blocks.table,
        blocks.order,
        weight.values,
        weight.scales,
        weight.offsets,
        out,
        tokens,
        grow,
        weight.scales.shape[2],
        OUTPUTS=outputs,
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        PER_TOKEN=per_token,
        SHARING=blocks.pairs // x.shape[0],
        TOP=triton.next_power_of_2(per_token),
        SWIGLU=swiglu,
        SORTED=blocks.table is not None,
        BLOCK_M=blocks.rows,
        TILES=tiling.block_n // TILE,
        TURN=tiling.split_k,
        PTX=has_ptx(),
        PDL=has_pdl(),
        num_warps=tiling.num_warps,
        launch_pdl=has_pdl(),
    )
    return out


def many_rows(x: Tensor, weight: PackedStack, blocks: Blocks, tiling: Tiling, *, swiglu: bool) -> Tensor:
    tokens, per_token = blocks.ids.shape
    outputs = weight.outputs // (2 if swiglu else 1)
    out = x.new_empty(blocks.pairs, outputs)
    if weight.bits == 8:
        x = shrunk(x)
    _w4a16_grouped_gemm_kernel[(triton.cdiv(weight.outputs, tiling.block_n) * blocks.count,)](
        in_packed_order(x),
        blocks.ids,
        blocks.table,
        blocks.order,
        weight.values,
        weight.scales,
        weight.offsets,
        sums_of(x, SPAN * 16 // weight.bits),
        out,
        tokens,
        blocks.count,
        1.0 if x.dtype is out.dtype else 1 / SHRINK.value,
        weight.scales.shape[2],
        OUTPUTS=outputs,
        COLUMNS=weight.columns,
        GROUP=weight.group_size,
        BITS=weight.bits,
        HAS_OFFSETS=weight.offsets is not None,
        PER_TOKEN=per_token,
        SHARING=blocks.pairs // x.shape[0],
        TOP=triton.next_power_of_2(per_token),
        SWIGLU=swiglu,
        SORTED=blocks.table is not None,
        BLOCK_M=blocks.rows,
        TILES=tiling.block_n // TILE,
        STAGES=tiling.num_stages,
        PTX=has_ptx(),
        num_warps=tiling.num_warps,
    )
    return out


@triton.jit
def _tiles(part, OUTPUTS: tl.constexpr, TILES: tl.constexpr, SWIGLU: tl.constexpr):
    """Which tiles of a weight a program takes: with SwiGLU of the gates, and behind them the same of the others."""
    tile = tl.arange(0, TILES)
    if SWIGLU:
        return part * (TILES // 2) + tile % (TILES // 2) + tile // (TILES // 2) * (OUTPUTS // 16)
    else:
        return part * TILES + tile


@triton.jit
def _read_rows(x_ptr, row, is_row, chunk, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """[8, chunks, rows / 8, parts, columns]"""
    part = chunk[None, :, None, None, None] * PARTS + tl.arange(0, PARTS)[None, None, None, :, None]
    column = part * 32 + tl.arange(0, 32)[None, None, None, None, :]
    at = row[:, None, :, None, None] * COLUMNS + column
    return tl.load(x_ptr + at, mask=is_row[:, None, :, None, None] & (column < COLUMNS), other=0.0)


@triton.jit
def _read_words(words, chunk, CHUNKS: tl.constexpr):
    return tl.load(words + chunk * 256, mask=chunk < CHUNKS, other=0, eviction_policy="evict_first")


@triton.jit
def _read_groups(ptr, chunk, part, tile, filled, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Scales or offsets of the groups in which a part of each chunk lies. Behind the last, where all sums are zero, any
    will do."""
    group = tl.minimum((chunk * PARTS + part) * 32 // GROUP, COLUMNS // GROUP - 1)
    return read_per_output(ptr + group[:, None] * filled + tile[None, :] * 16)


@triton.jit
def _add_turn(
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
    products too, with ones: so they come where the others are."""
    PARTS: tl.constexpr = 16 // BITS
    BFLOAT16: tl.constexpr = BITS == 4 and x.dtype == tl.bfloat16
    TURN: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[2]
    TILES: tl.constexpr = acc.shape[1] // 16
    if BITS == 8 and x.dtype != tl.float16:
        x = (x.to(tl.float32) * SHRINK).to(tl.float16)
    raw, sums = tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
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
        if part == PARTS - 1 or (part + 1) * 32 % GROUP == 0:  # a group may end here
            if part * 32 >= GROUP:
                scales = _read_groups(scales_ptr, chunk, part, tile, filled, COLUMNS, GROUP, PARTS)
            acc += (raw - zero_of(BITS, BFLOAT16) * repeated(sums, TILES)) * per_output(scales, ROWS)
            if HAS_OFFSETS:
                offsets = _read_groups(offsets_ptr, chunk, part, tile, filled, COLUMNS, GROUP, PARTS)
                acc += repeated(sums, TILES) * per_output(offsets, ROWS)
            raw, sums = tl.zeros_like(acc), tl.zeros([TURN, 16, ROWS], tl.float32)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _w4a16_grouped_gemv_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    out_ptr,
    tokens,
    grow,
    filled,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARING: tl.constexpr,
    TOP: tl.constexpr,
    SWIGLU: tl.constexpr,
    SORTED: tl.constexpr,
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
    PROGRAMS: tl.constexpr = (OUTPUTS * (2 if SWIGLU else 1) + 16 * TILES - 1) // (16 * TILES)
    program = tl.program_id(0)
    chunk = tl.arange(0, TURN)
    tile = _tiles(program % PROGRAMS, OUTPUTS, TILES, SWIGLU)
    place = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    wait_for_previous(PDL)
    expert, pair, is_row, is_used = rows_of_block(
        ids_ptr, table_ptr, order_ptr, program // PROGRAMS, tokens, PER_TOKEN, TOP, BLOCK_M, SORTED
    )
    if not is_used:
        return
    words = words_ptr + (expert * (filled // 16) + tile)[None, :, None, None] * (CHUNKS * 256) + place
    scales_ptr += expert * (COLUMNS // GROUP * filled)
    if HAS_OFFSETS:
        offsets_ptr += expert * (COLUMNS // GROUP * filled)
    ahead = _read_words(words, chunk[:, None, None, None], CHUNKS)
    scales = _read_groups(scales_ptr, chunk, 0, tile, filled, COLUMNS, GROUP, PARTS)
    row = tl.trans(tl.reshape((pair // SHARING).to(tl.int64), [BLOCK_M // 8, 8]))
    is_there = tl.trans(tl.reshape(is_row.to(tl.int32), [BLOCK_M // 8, 8])) > 0
    acc = tl.zeros([TURN, 16 * TILES, BLOCK_M], tl.float32)
    for _ in tl.static_range(0, CHUNKS, TURN):
        after = chunk + TURN
        next_words = _read_words(words, after[:, None, None, None], CHUNKS)
        next_scales = _read_groups(scales_ptr, after, 0, tile, filled, COLUMNS, GROUP, PARTS)
        x = _read_rows(x_ptr, row, is_there, chunk, COLUMNS, PARTS)
        acc = _add_turn(
            acc, ahead, x, scales, chunk, tile, filled, scales_ptr, offsets_ptr, COLUMNS, GROUP, BITS, HAS_OFFSETS, PTX
        )
        chunk, ahead, scales = after, next_words, next_scales
    store_with_swiglu(tl.sum(acc, axis=0) * grow, out_ptr, program % PROGRAMS, pair, is_row, OUTPUTS, SWIGLU)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _w4a16_grouped_gemm_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    sums_ptr,
    out_ptr,
    tokens,
    blocks,
    grow,
    filled,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARING: tl.constexpr,
    TOP: tl.constexpr,
    SWIGLU: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums [outputs, rows]"""
    PROGRAMS: tl.constexpr = (OUTPUTS * (2 if SWIGLU else 1) + 16 * TILES - 1) // (16 * TILES)
    block, part = side_by_side(tl.program_id(0), blocks, PROGRAMS)
    expert, pair, is_row, is_used = rows_of_block(
        ids_ptr, table_ptr, order_ptr, block, tokens, PER_TOKEN, TOP, BLOCK_M, SORTED
    )
    if not is_used:
        return
    tile = _tiles(part, OUTPUTS, TILES, SWIGLU)
    row = (pair // SHARING).to(tl.int64)
    acc = multiply_chunks(
        x_ptr,
        row,
        is_row,
        words_ptr,
        expert * (filled // 16) + tile,
        scales_ptr,
        offsets_ptr,
        expert * (COLUMNS // GROUP * filled) + tile * 16,
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
    store_with_swiglu(acc * grow, out_ptr, part, pair, is_row, OUTPUTS, SWIGLU)
