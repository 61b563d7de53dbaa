"""Grouped GEMM with experts of 4 and 8 bits in groups (W4A16) or in MXFP4, for any number of rows: a GEMV for blocks
of up to 16 rows, where reading weights is the limit, a GEMM for larger ones, where arithmetic is. The share was not
measured (times of an earlier state: docs/benchmarks.md).

Weights lie as `int4_pack` says, one expert behind the other. Which rows a program has is `routing`'s affair.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling, side_by_side
from penstock.model.ops.triton.linear.gemv import SHRINK
from penstock.model.ops.triton.linear.int4_pack import SPAN, PackedWeight, in_packed_order
from penstock.model.ops.triton.linear.q6k import add_turn, read_groups, read_rows, read_words
from penstock.model.ops.triton.linear.w4a16_gemm import multiply_chunks, sums_of
from penstock.model.ops.triton.moe.grouped_gemm import Gate, gate_constants, shrunk, store_with_swiglu
from penstock.model.ops.triton.moe.routing import FEW, Blocks, rows_of_block

TILE = 16  # outputs


@dataclass(frozen=True)
class PackedStack(PackedWeight):
    """One linear of every expert: tensors have the experts first."""

    order: Tensor | None = None  # [experts, in] int32: of the columns, if they are not stored as they come


def product(x: Tensor, weight: PackedStack, blocks: Blocks, tiling: Tiling, *, gate: Gate | None) -> Tensor:
    """See `grouped_gemm.product`. Blocks of up to FEW rows are a GEMV."""
    tokens, per_token = blocks.ids.shape
    outputs = weight.outputs // (2 if gate is not None else 1)
    out = x.new_empty(blocks.pairs, outputs)
    x = shrunk(x) if weight.bits == 8 else x
    more: dict[str, Any] = {"TURN": tiling.split_k, "PDL": has_pdl(), "launch_pdl": has_pdl()}
    kernel, rows = _w4a16_grouped_gemv_kernel, x
    if blocks.rows > FEW:
        sums = None if weight.is_mxfp4 else sums_of(x, SPAN * 16 // weight.bits)
        more = {"sums_ptr": sums, "blocks": blocks.count, "STAGES": tiling.num_stages}
        kernel, rows = _w4a16_grouped_gemm_kernel, in_packed_order(x)
    kernel[(triton.cdiv(weight.outputs, tiling.block_n) * blocks.count,)](
        rows,
        blocks.ids,
        blocks.table,
        blocks.order,
        weight.values,
        weight.scales,
        weight.offsets,
        weight.bias,
        out,
        tokens,
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
        HAS_BIAS=weight.bias is not None,
        **gate_constants(gate),
        SORTED=blocks.table is not None,
        BLOCK_M=blocks.rows,
        TILES=tiling.block_n // TILE,
        PTX=has_ptx(),
        num_warps=tiling.num_warps,
        **more,
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


@triton.jit(do_not_specialize=["tokens"])
def _w4a16_grouped_gemv_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
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
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    wait_for_previous(PDL)
    expert, pair, is_row, is_used = rows_of_block(
        ids_ptr, table_ptr, order_ptr, program // PROGRAMS, tokens, PER_TOKEN, TOP, BLOCK_M, SORTED
    )
    if not is_used:
        return
    place = expert * (filled // 16) + tile  # of the words, where experts lie one behind the other
    scales_ptr += expert * (COLUMNS // GROUP * filled)
    if HAS_OFFSETS:
        offsets_ptr += expert * (COLUMNS // GROUP * filled)
    ahead = read_words(words_ptr, place, chunk, CHUNKS)
    scales = read_groups(scales_ptr, chunk, 0, 0, tile, filled, COLUMNS, GROUP, PARTS)
    row = tl.trans(tl.reshape((pair // SHARING).to(tl.int64), [BLOCK_M // 8, 8]))
    is_there = tl.trans(tl.reshape(is_row.to(tl.int32), [BLOCK_M // 8, 8])) > 0
    acc = tl.zeros([TURN, 16 * TILES, BLOCK_M], tl.float32)
    for _ in tl.static_range(0, CHUNKS, TURN):
        after = chunk + TURN
        next_words = read_words(words_ptr, place, after, CHUNKS)
        next_scales = read_groups(scales_ptr, after, 0, 0, tile, filled, COLUMNS, GROUP, PARTS)
        x = read_rows(x_ptr, row, is_there, chunk, COLUMNS, PARTS)
        acc = add_turn(
            acc, ahead, x, scales, chunk, tile, filled, scales_ptr, offsets_ptr, COLUMNS, GROUP, BITS, HAS_OFFSETS, PTX
        )
        chunk, ahead, scales = after, next_words, next_scales
    total, part = tl.sum(acc, axis=0) * grow, program % PROGRAMS
    store_with_swiglu(total, bias_ptr, out_ptr, part, expert, pair, is_row, OUTPUTS, HAS_BIAS, SWIGLU, ALPHA, LIMIT)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _w4a16_grouped_gemm_kernel(
    x_ptr,
    ids_ptr,
    table_ptr,
    order_ptr,
    words_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    grow,
    filled,
    sums_ptr,
    blocks,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARING: tl.constexpr,
    TOP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
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
    acc *= grow
    store_with_swiglu(acc, bias_ptr, out_ptr, part, expert, pair, is_row, OUTPUTS, HAS_BIAS, SWIGLU, ALPHA, LIMIT)
