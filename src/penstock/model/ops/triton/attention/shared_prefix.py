"""Attention over prefixes that decodes share (cascade attention), for eight and more decodes with a prefix in common:
it is read once for all of them, on tensor cores. 256 decodes with 2,048 of 2,208 tokens in common take 88 µs a layer
instead of 318 (docs/gpu.md). Arithmetic on tensor cores is the limit; the share was not measured.

A program takes one piece of a prefix for the queries of one tile of sequences, all the heads that share a KV head: row
m is head m % group of sequence m // group. Its result is joined by `decode` with each sequence's own part of the
context.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.attention.online_softmax import LOG2_E, Partials, nothing_yet, store_partial
from penstock.model.ops.triton.attention.prefill import attend_tiles, through_memory, tiles_of, tiling_of
from penstock.model.ops.triton.attention.rope import BATCH_POINTERS, Rotation, Shape, load_rotated
from penstock.model.ops.triton.common.device import num_processors
from penstock.model.ops.triton.common.pdl import has_pdl, launch_dependents
from penstock.model.ops.triton.common.tiling import Tiling

_ROWS = 64  # of a tile; a prefix is read once for each
_PROGRAMS_PER_PROCESSOR = 2  # one's softmax overlaps another's products


def sequences_per_tile(num_heads: int, num_kv_heads: int) -> int:
    return max(_ROWS // (num_heads // num_kv_heads), 1)


def pieces_wanted(num_kv_heads: int, device: torch.device) -> int:
    """So many fill the device."""
    return max(num_processors(device) * _PROGRAMS_PER_PROCESSOR // num_kv_heads, 1)


def _tiling(dtype: torch.dtype, head_dim: int, block_size: int) -> Tiling:
    """Prefill's, which has fewer rows where products are exact and registers short: here more threads have to do."""
    tiling = tiling_of(dtype, head_dim, block_size)
    return replace(tiling, block_m=_ROWS, num_warps=tiling.num_warps * _ROWS // tiling.block_m)


def attend_shared(
    qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch, out: Tensor, tiling: Tiling | None = None
) -> Partials:
    """One of each piece and place in its tile. The members' rows of `out` are written on the way."""
    shared = batch.shared
    assert shared is not None, "nothing is shared"
    tiling = tiling or _tiling(qkv.dtype, spec.head_dim, kv.block_size)
    shape = Shape.of(spec, kv, qkv.dtype)
    num_pieces, sequences = shared.pieces.shape[0], shared.tiles.shape[1]
    partials = Partials.empty(num_pieces * sequences, spec, qkv.device)
    _attend_shared_kernel[(spec.num_kv_heads, num_pieces)](
        qkv,
        out,
        tiles_of(kv.keys, tiling.block_n, shape),
        tiles_of(kv.own_values, tiling.block_n, shape),
        Rotation.of(spec, rope),
        partials,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        shared.tiles,
        shared.pieces,
        batch.block_tables.stride(0),
        spec.scale * kv.key_scale * LOG2_E,
        SHAPE=shape,
        SEQUENCES=sequences,
        PDL=has_pdl(),
        BLOCK_M=max(triton.next_power_of_2(sequences * shape.group), 16),
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return partials


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=[*BATCH_POINTERS, "tiles_ptr", "pieces_ptr"]
)
def _attend_shared_kernel(
    qkv_ptr,
    out_ptr,
    keys,
    values,
    rotation,
    partials,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    tiles_ptr,
    pieces_ptr,
    table_stride,
    scale,
    SHAPE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    launch_dependents(PDL)  # `decode` goes over the sequences' own blocks meanwhile
    D: tl.constexpr = SHAPE.dim
    GROUP: tl.constexpr = SHAPE.group
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    tile_ptr = tiles_ptr + tl.load(pieces_ptr + piece * 3) * SEQUENCES
    begin = tl.load(pieces_ptr + piece * 3 + 1)
    end = tl.load(pieces_ptr + piece * 3 + 2)
    if begin >= end:
        return
    m = tl.arange(0, BLOCK_M)
    place = m // GROUP
    head = kv_head * GROUP + m % GROUP
    sequences = tl.load(tile_ptr + place, mask=place < SEQUENCES, other=-1)
    inside = sequences >= 0
    rows = tl.load(query_starts_ptr + sequences, mask=inside, other=0).to(tl.int64)
    positions = tl.load(context_lens_ptr + sequences, mask=inside, other=1) - 1
    q = load_rotated(qkv_ptr + rows * SHAPE.qkv_width + head * D, positions, inside, rotation, rotation.q_norm, SHAPE)
    d = tl.arange(0, SHAPE.block_dim)[None, :]
    out = out_ptr + (rows * SHAPE.num_heads + head)[:, None] * D + d
    mask = inside[:, None] & (d < D)
    q = through_memory(q, out, mask)  # all programs of a tile write the same there

    table_ptr = block_tables_ptr + tl.load(tile_ptr).to(tl.int64) * table_stride  # of one for all
    state = nothing_yet(BLOCK_M, SHAPE.block_dim)
    acc, total, highest = attend_tiles(
        state, q, positions, positions, begin, end, keys, values, table_ptr, kv_head, scale, SHAPE, False, BLOCK_N
    )
    at = (piece * SEQUENCES + place) * SHAPE.num_heads + head
    store_partial(partials, at, inside, acc, total, highest, D, SHAPE.block_dim)
