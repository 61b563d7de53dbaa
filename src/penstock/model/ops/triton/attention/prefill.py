"""Prefill attention over the paged cache (FlashAttention), for sequences that bring more than one token: chunks of any
length on any context. 32 prompts of 4,096 tokens run at 430 TFLOP/s on an H200, 56 % of what its products reach
(docs/benchmarks.md, W6).

A program takes some consecutive queries of one sequence, all the heads that share a KV head: row m of its tile is query
m // group of head m % group. It walks the context in tiles that never span two blocks, so a tile is one piece of memory
and comes through the tensor memory accelerator. Softmax is the online one, in powers of two.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.attention.kv_store import chunk_of
from penstock.model.ops.triton.attention.online_softmax import (
    LOG2_E,
    capped,
    log_sum_exp,
    nothing_yet,
    outputs,
    sinks_alone,
)
from penstock.model.ops.triton.attention.rope import BATCH_NUMBERS, BATCH_POINTERS, Rotation, Shape, load_rotated
from penstock.model.ops.triton.attention.token_split import kept, oldest_seen
from penstock.model.ops.triton.common.tiling import Tiling


def tiling_of(dtype: torch.dtype, head_dim: int, block_size: int) -> Tiling:
    if dtype is torch.float32:  # exact products: no tensor cores, and twice the bytes
        return Tiling(block_m=32, block_n=keys_per_tile(block_size, 16), num_warps=4, num_stages=1)
    # Two programs or more share a processor: one's softmax overlaps another's products.
    keys, stages = keys_per_tile(block_size, 64 if head_dim <= 128 else 32), 2 if head_dim <= 64 else 3
    return Tiling(block_m=64, block_n=keys, num_warps=4, num_stages=stages)


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
    *,
    lse: Tensor | None = None,
) -> None:
    """`lse` [tokens, heads] float32: where log-sum-exps of scores go, if ranks share out tokens."""
    assert (lse is not None) == (kv.tokens.size > 1)
    tiling = tiling or tiling_of(qkv.dtype, spec.head_dim, kv.block_size)
    shape = Shape.of(spec, kv, qkv.dtype)
    rows = max(tiling.block_m, triton.next_power_of_2(shape.group))
    queries = rows // shape.group
    # The longest contexts start first: programs are started from the last tile down, all its heads together.
    grid = (spec.num_kv_heads, batch.num_tokens // queries + batch.num_sequences)
    _attend_chunks_kernel[grid](
        qkv,
        out,
        lse,
        tiles_of(kv.keys, tiling.block_n, shape),
        tiles_of(kv.own_values, tiling.block_n, shape),
        Rotation.of(spec, rope),
        spec.sinks if shape.has_sinks else None,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.num_sequences,
        spec.scale * kv.key_scale * LOG2_E,
        kv.value_scale,
        SHAPE=shape,
        QUERIES=queries,
        BLOCK_M=rows,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def tiles_of(cache: Tensor, keys: int, shape: Shape) -> TensorDescriptor:
    """The cache in tiles of `keys` slots, for the tensor memory accelerator."""
    return TensorDescriptor.from_tensor(cache.view(-1, shape.dim), [keys, shape.block_dim])


@triton.jit
def through_memory(q, out, mask):
    """Queries, stored and loaded again: only an operand that was loaded is multiplied from shared memory."""
    tl.store(out, q, mask=mask)
    tl.debug_barrier()
    return tl.load(out, mask=mask, other=0.0)


@triton.jit
def attend_tiles(
    state,
    q,
    oldest,
    ends,
    begin,
    end,
    keys,
    values,
    table_ptr,
    kv_head,
    scale,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Fold the keys from `begin`, the start of a tile, to `end` into the running softmax's state. If they are masked, a
    row sees those before its own of `ends`, and where there is a window none before its `oldest`."""
    acc, total, highest = state
    # A block's id is loaded one turn ahead: the pipeline of tiles must not wait for it.
    block = tl.load(table_ptr + begin // SHAPE.block_size, mask=begin < end, other=0)
    for start in tl.range(begin, end, BLOCK_N):
        slot = (block * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + start % SHAPE.block_size
        block = tl.load(table_ptr + (start + BLOCK_N) // SHAPE.block_size, mask=start + BLOCK_N < end, other=0)
        k = keys.load([slot, 0]).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=SHAPE.precision)
        if SHAPE.cap > 0.0:
            scores = capped(scores * scale, SHAPE.cap) / scale
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            seen = key[None, :] < ends[:, None]
            if SHAPE.window:
                seen &= key[None, :] >= oldest[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        v = values.load([slot, 0]).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=SHAPE.precision)
        highest = higher
    return acc, total, highest


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _attend_chunks_kernel(
    qkv_ptr,
    out_ptr,
    lse_ptr,
    keys,
    values,
    rotation,
    sinks_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    scale,
    value_scale,
    SHAPE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    D: tl.constexpr = SHAPE.dim
    GROUP: tl.constexpr = SHAPE.group
    WINDOW: tl.constexpr = SHAPE.window
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first, row, query_len = chunk_of(tile, query_starts_ptr, num_sequences, QUERIES)
    if (query_len == 1) | (first >= query_len):
        return
    before = tl.load(context_lens_ptr + sequence) - query_len  # the context without this step's tokens

    m = tl.arange(0, BLOCK_M)
    query = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    inside = (m < QUERIES * GROUP) & (query < query_len)
    positions = before + query
    rows = (row + query).to(tl.int64)
    d = tl.arange(0, SHAPE.block_dim)[None, :]
    out = out_ptr + (rows * SHAPE.num_heads + head)[:, None] * D + d
    mask = inside[:, None] & (d < D)
    heads = qkv_ptr + rows * SHAPE.qkv_width + head * D
    q = load_rotated(heads, positions, inside, rotation, rotation.q_norm, SHAPE)
    q = through_memory(q, out, mask)  # which is this program's own

    # From here on a key's position is its place among those that are kept here.
    first_position = before + first
    last_end = before + tl.minimum(first + QUERIES, query_len)
    ends = kept(positions + 1, SHAPE)
    end = kept(last_end, SHAPE)
    # Only tiles at the edges of what the queries see need a mask.
    all_see_until = kept(first_position + 1, SHAPE) // BLOCK_N * BLOCK_N
    begin = 0
    all_see_from = 0
    oldest = ends
    if WINDOW:
        oldest = kept(oldest_seen(positions, SHAPE), SHAPE)
        begin = kept(oldest_seen(first_position, SHAPE), SHAPE) // BLOCK_N * BLOCK_N
        last_oldest = kept(oldest_seen(last_end - 1, SHAPE), SHAPE)
        all_see_from = tl.minimum(tl.cdiv(last_oldest, BLOCK_N) * BLOCK_N, end)

    state = nothing_yet(BLOCK_M, SHAPE.block_dim)
    if SHAPE.has_sinks:
        state = sinks_alone(sinks_ptr, head, inside, SHAPE.block_dim)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    if WINDOW:
        state = attend_tiles(
            state, q, oldest, ends, begin, all_see_from, keys, values, table_ptr, kv_head, scale, SHAPE, True, BLOCK_N
        )
    state = attend_tiles(
        state,
        q,
        oldest,
        ends,
        all_see_from,
        all_see_until,
        keys,
        values,
        table_ptr,
        kv_head,
        scale,
        SHAPE,
        False,
        BLOCK_N,
    )
    rest = tl.maximum(all_see_from, all_see_until)
    acc, total, highest = attend_tiles(
        state, q, oldest, ends, rest, end, keys, values, table_ptr, kv_head, scale, SHAPE, True, BLOCK_N
    )
    tl.store(out, outputs(acc, total, value_scale, SHAPE.ranks > 1), mask=mask)
    if SHAPE.ranks > 1:
        tl.store(lse_ptr + rows * SHAPE.num_heads + head, log_sum_exp(total, highest), mask=inside)
