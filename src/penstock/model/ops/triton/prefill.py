"""Attention of prefill chunks: every sequence of a step that brings more than one token, over its blocks.

A program takes some consecutive queries of one sequence, all the heads that share a KV head: row m of its tile is query
m // group of head m % group. It walks the context in tiles that never span two blocks, so a tile is one piece of memory
and comes through the tensor memory accelerator. Softmax is the online one of FlashAttention, in powers of two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.rotary import BATCH_NUMBERS, BATCH_POINTERS, load_rotated, locate

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    rows: int  # queries times heads of one program
    keys: int  # of one turn of its loop; a block is a multiple of it
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, block_size: int) -> Tiling:
        if dtype is torch.float32:
            return cls(32, keys_per_tile(block_size, 16), 4, 1)  # exact products: no tensor cores, and twice the bytes
        # Two programs or more share a processor: one's softmax overlaps another's products.
        return cls(64, keys_per_tile(block_size, 64 if head_dim <= 128 else 32), 4, 2 if head_dim <= 64 else 3)


def keys_per_tile(block_size: int, most: int) -> int:
    """The largest power of two that divides a block, up to `most`."""
    return min(block_size & -block_size, most)


def attend_chunks(
    qkv: Tensor,
    spec: AttentionSpec,
    rope: Rope,
    kv: LayerKV,
    batch: Batch,
    out: Tensor,
    tiling: Tiling | None = None,
) -> None:
    tiling = tiling or Tiling.of(qkv.dtype, spec.head_dim, kv.block_size)
    group = spec.num_heads // spec.num_kv_heads
    rows = max(tiling.rows, triton.next_power_of_2(group))
    queries = rows // group
    block_d = max(triton.next_power_of_2(spec.head_dim), 16)

    def descriptor(cache: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(cache.view(-1, spec.head_dim), [tiling.keys, block_d])

    # The longest contexts start first: programs are started from the last tile down, all its heads together.
    grid = (spec.num_kv_heads, batch.num_tokens // queries + batch.num_sequences)
    _attend_chunks_kernel[grid](
        qkv,
        out,
        descriptor(kv.keys),
        descriptor(kv.values),
        rope.cos,
        rope.sin,
        spec.q_norm,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.num_sequences,
        spec.scale * LOG2_E,
        spec.norm_eps,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK_SIZE=kv.block_size,
        WINDOW=spec.window or 0,
        NORM=spec.q_norm is not None,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        QUERIES=queries,
        BLOCK_M=rows,
        BLOCK_N=tiling.keys,
        BLOCK_D=block_d,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _attend_tiles(
    acc,
    total,
    highest,
    q,
    positions,
    begin,
    end,
    keys,
    values,
    table_ptr,
    kv_head,
    scale,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the keys from `begin`, the start of a tile, to `end` into the running softmax, in powers of two."""
    # A block's id is loaded one turn ahead: the pipeline of tiles must not wait for it.
    block = tl.load(table_ptr + begin // BLOCK_SIZE, mask=begin < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        slot = (block * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE
        block = tl.load(table_ptr + (start + BLOCK_N) // BLOCK_SIZE, mask=start + BLOCK_N < end, other=0)
        k = keys.load([slot, 0])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            seen = key[None, :] <= positions[:, None]
            if WINDOW:
                seen &= key[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        v = values.load([slot, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _attend_chunks_kernel(
    qkv_ptr,
    out_ptr,
    keys,
    values,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first = locate(tile, query_starts_ptr, num_sequences, QUERIES)
    row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - row
    if (query_len == 1) | (first >= query_len):
        return
    before = tl.load(context_lens_ptr + sequence) - query_len  # the context without this step's tokens

    m = tl.arange(0, BLOCK_M)
    query = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = (m < QUERIES * GROUP) & (query < query_len)
    positions = before + query
    rows = (row + query).to(tl.int64)
    heads = qkv_ptr + rows * ((HEADS + 2 * KV_HEADS) * D) + head * D
    d = tl.arange(0, BLOCK_D)[None, :]
    out = out_ptr + (rows * HEADS + head)[:, None] * D + d
    mask = inside[:, None] & (d < D)
    q = load_rotated(heads, positions, inside, cos_ptr, sin_ptr, norm_ptr, eps, D, NORM, BLOCK_D)
    # By way of memory that is this program's own: only an operand that was loaded is multiplied from shared memory.
    tl.store(out, q, mask=mask)
    tl.debug_barrier()
    q = tl.load(out, mask=mask, other=0.0)

    first_position = before + first
    end = before + tl.minimum(first + QUERIES, query_len)
    # Only tiles at the edges of what the queries see need a mask.
    all_see_until = (first_position + 1) // BLOCK_N * BLOCK_N
    begin = 0
    all_see_from = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        all_see_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N, end)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a row may see nothing of its first tiles
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    if WINDOW:
        acc, total, highest = _attend_tiles(
            acc, total, highest, q, positions, begin, all_see_from, keys, values, table_ptr, kv_head, scale,
            KV_HEADS, BLOCK_SIZE, WINDOW, True, PRECISION, BLOCK_N,
        )  # fmt: skip
    acc, total, highest = _attend_tiles(
        acc, total, highest, q, positions, all_see_from, all_see_until, keys, values, table_ptr, kv_head, scale,
        KV_HEADS, BLOCK_SIZE, WINDOW, False, PRECISION, BLOCK_N,
    )  # fmt: skip
    acc, total, highest = _attend_tiles(
        acc, total, highest, q, positions, tl.maximum(all_see_from, all_see_until), end, keys, values, table_ptr,
        kv_head, scale, KV_HEADS, BLOCK_SIZE, WINDOW, True, PRECISION, BLOCK_N,
    )  # fmt: skip

    tl.store(out, acc / total[:, None], mask=mask)
