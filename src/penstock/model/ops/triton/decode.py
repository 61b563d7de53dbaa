"""Attention of decodes: sequences that bring one token. One launch norms, rotates, stores and attends.

A program takes one chunk of a context with all the heads that share a KV head, so a few long contexts fill the device
as well as many short ones. Whichever program finishes last of a sequence's chunks joins their results.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.decode_plan import DecodePlan
from penstock.model.ops.triton.prefill import LOG2_E, keys_per_tile
from penstock.model.ops.triton.rotary import load_rotated


@dataclass(frozen=True)
class Tiling:
    keys: int  # of one turn of a program's loop; a block is a multiple of it
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, head_dim: int, block_size: int) -> Tiling:
        if dtype is torch.float32:
            return cls(keys_per_tile(block_size, 16), 4, 2)
        return cls(keys_per_tile(block_size, 64 if head_dim <= 128 else 32), 4, 3)


def attend_decodes(
    qkv: Tensor,
    spec: AttentionSpec,
    rope: Rope,
    kv: LayerKV,
    batch: Batch,
    plan: DecodePlan,
    out: Tensor,
    tiling: Tiling | None = None,
) -> None:
    tiling = tiling or Tiling.of(qkv.dtype, spec.head_dim, kv.block_size)
    num_chunks = plan.chunks.shape[0]
    group = spec.num_heads // spec.num_kv_heads
    partial = qkv.new_empty(num_chunks, spec.num_heads, spec.head_dim, dtype=torch.float32)
    statistics = qkv.new_empty(2, num_chunks, spec.num_heads, dtype=torch.float32)
    _attend_decodes_kernel[(spec.num_kv_heads, num_chunks)](
        qkv,
        out,
        kv.keys,
        kv.values,
        rope.cos,
        rope.sin,
        spec.q_norm,
        spec.k_norm,
        batch.block_tables,
        plan.chunks,
        plan.num_chunks,
        plan.arrivals,
        partial,
        statistics[0],
        statistics[1],
        batch.block_tables.stride(0),
        spec.scale * LOG2_E,
        spec.norm_eps,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK_SIZE=kv.block_size,
        WINDOW=spec.window or 0,
        NORM=spec.q_norm is not None,
        PRECISION="ieee" if qkv.dtype is torch.float32 else "tf32",
        BLOCK_G=triton.next_power_of_2(group),
        BLOCK_M=max(triton.next_power_of_2(group + 1), 16),  # the least that a matrix product takes
        BLOCK_N=tiling.keys,
        BLOCK_D=max(triton.next_power_of_2(spec.head_dim), 16),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables_ptr"])
def _attend_decodes_kernel(
    qkv_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    block_tables_ptr,
    chunks_ptr,
    num_chunks_ptr,
    arrivals_ptr,
    partial_ptr,
    highest_ptr,
    total_ptr,
    table_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0)
    chunk = tl.program_id(1)
    chunk_ptr = chunks_ptr + chunk * 8
    sequence = tl.load(chunk_ptr)
    row = tl.load(chunk_ptr + 1).to(tl.int64)
    position = tl.load(chunk_ptr + 2)
    begin = tl.load(chunk_ptr + 3)
    chunk_end = tl.load(chunk_ptr + 4)
    first_chunk = tl.load(chunk_ptr + 5)
    last_chunk = tl.load(chunk_ptr + 6)
    if chunk >= tl.load(num_chunks_ptr):
        return
    is_last = chunk == last_chunk
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(position + 1 - WINDOW, 0)
        if chunk_end <= oldest:
            return
        first_chunk += oldest // (chunk_end - begin)
        begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)
    end = tl.minimum(chunk_end, position)  # the new token is not read back
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    block = tl.load(table_ptr + begin // BLOCK_SIZE)
    home = tl.load(table_ptr + position // BLOCK_SIZE).to(tl.int64)

    # Rows of q are the heads that share this KV head, and behind them the new token's key; what that one attends to is
    # dropped.
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_query = m < GROUP
    head = tl.where(is_query, kv_head * GROUP + m, HEADS + kv_head)
    token_ptr = qkv_ptr + row * ((HEADS + 2 * KV_HEADS) * D)
    norms = q_norm_ptr
    if NORM:
        norms = tl.where(is_query, q_norm_ptr, k_norm_ptr)[:, None]
    positions = tl.zeros([BLOCK_M], tl.int32) + position
    q = load_rotated(token_ptr + head * D, positions, m <= GROUP, cos_ptr, sin_ptr, norms, eps, D, NORM, BLOCK_D)
    v_new = tl.load(token_ptr + (HEADS + KV_HEADS + kv_head) * D + d, mask=d < D, other=0.0)[None, :]

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a window may hide all of a tile
    for start in tl.range(begin, end, BLOCK_N):
        slot = ((block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + start % BLOCK_SIZE) * D
        # A block's id is loaded one turn ahead: the pipeline of tiles must not wait for it.
        block = tl.load(table_ptr + (start + BLOCK_N) // BLOCK_SIZE, mask=start + BLOCK_N < end, other=0)
        at = slot + n[:, None] * D + d[None, :]
        seen = start + n < end
        if WINDOW:
            seen &= start + n >= oldest
        mask = seen[:, None] & (d < D)[None, :]  # of values too: a stale slot may hold a NaN
        k = tl.load(keys_ptr + at, mask=mask, other=0.0)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + at, mask=mask, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        highest = higher

    if is_last:
        slot = ((home * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * D + d[None, :]
        is_key = (m == GROUP)[:, None]
        tl.store(keys_ptr + slot + tl.zeros_like(m)[:, None], q, mask=is_key & (d < D)[None, :])
        tl.store(values_ptr + slot, v_new, mask=(d < D)[None, :])
        scores = tl.dot(q, q.T, input_precision=PRECISION) * scale
        score = tl.sum(tl.where((m == GROUP)[None, :], scores, 0.0), axis=1)
        higher = tl.maximum(highest, score)
        weight = tl.exp2(score - higher)
        decay = tl.exp2(highest - higher)
        total = total * decay + weight
        acc = acc * decay[:, None] + weight[:, None] * v_new.to(tl.float32)
        highest = higher

    num_chunks = last_chunk - first_chunk + 1
    mask = is_query[:, None] & (d < D)[None, :]
    if num_chunks == 1:
        out = out_ptr + row * (HEADS * D) + head[:, None] * D + d[None, :]
        tl.store(out, acc / total[:, None], mask=mask)
        return

    mine = chunk * HEADS + head
    tl.store(partial_ptr + mine[:, None] * D + d[None, :], acc, mask=mask)
    tl.store(highest_ptr + mine, highest, mask=is_query)
    tl.store(total_ptr + mine, total, mask=is_query)
    tl.debug_barrier()  # every thread's part is stored before one thread announces it
    arrival_ptr = arrivals_ptr + sequence * KV_HEADS + kv_head
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(arrival_ptr, 0)
        _join_chunks(
            out_ptr + row * (HEADS * D), partial_ptr, highest_ptr, total_ptr, first_chunk, num_chunks, kv_head,
            HEADS, GROUP, D, BLOCK_G, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _join_chunks(
    out_ptr,
    partial_ptr,
    highest_ptr,
    total_ptr,
    first_chunk,
    num_chunks,
    kv_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Weigh the chunks' results by their share of the softmax. Others wrote them: the L1 cache is passed by."""
    CHUNKS: tl.constexpr = 16  # at a time
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    highest = tl.full([BLOCK_G], -1e30, tl.float32)
    for base in range(0, num_chunks, CHUNKS):
        c = base + tl.arange(0, CHUNKS)
        at = (first_chunk + c)[:, None] * HEADS + head[None, :]  # [chunks, heads]
        inside = (c < num_chunks)[:, None] & (g < GROUP)[None, :]
        theirs = tl.load(highest_ptr + at, mask=inside, other=-1e30, cache_modifier=".cg")
        totals = tl.load(total_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        mask = inside[:, :, None] & (d < D)[None, None, :]
        partial = tl.load(
            partial_ptr + at[:, :, None] * D + d[None, None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, tl.max(theirs, axis=0))
        weights = tl.exp2(theirs - higher[None, :])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(totals * weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(partial * weights[:, :, None], axis=0)
        highest = higher
    out = out_ptr + head[:, None] * D + d[None, :]
    tl.store(out, acc / total[:, None], mask=(g < GROUP)[:, None] & (d < D)[None, :])
