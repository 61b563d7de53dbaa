"""Decode attention over the paged cache (split-KV, flash decoding), for sequences that bring one token: any batch, any
context, head size, window and cap. One launch norms, rotates, stores and attends. 256 decodes of 8B read KV at 92 % of
the H200's bandwidth (docs/benchmarks.md, W2).

A program takes one chunk of a context with all the heads that share a KV head, so a few long contexts fill the device
as well as many short ones. Whichever program finishes last of a sequence's chunks joins their results.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.attention.decode_plan import DecodePlan
from penstock.model.ops.triton.attention.online_softmax import (
    LOG2_E,
    Partials,
    capped,
    joined,
    load_partial,
    log_sum_exp,
    nothing_yet,
    outputs,
    sinks_alone,
    store_partial,
)
from penstock.model.ops.triton.attention.prefill import keys_per_tile
from penstock.model.ops.triton.attention.rope import Rotation, Shape, as_stored, load_rotated
from penstock.model.ops.triton.attention.token_split import keeps, kept, oldest_seen
from penstock.model.ops.triton.common.pdl import has_pdl, wait_for_previous
from penstock.model.ops.triton.common.tiling import Tiling


def tiling_of(dtype: torch.dtype, head_dim: int, block_size: int) -> Tiling:
    if dtype is torch.float32:
        return Tiling(block_n=keys_per_tile(block_size, 16), num_warps=4, num_stages=2)
    return Tiling(block_n=keys_per_tile(block_size, 64 if head_dim <= 128 else 32), num_warps=4, num_stages=3)


def attend_decodes(
    qkv: Tensor,
    spec: AttentionSpec,
    rope: Rope,
    kv: LayerKV,
    batch: Batch,
    plan: DecodePlan,
    out: Tensor,
    tiling: Tiling | None = None,
    *,
    shared: Partials | None = None,
    lse: Tensor | None = None,
) -> None:
    """`shared` is what `attend_shared` found in the prefixes that `batch.shared` tells of. `lse` [tokens, heads]
    float32: where log-sum-exps of scores go, if ranks share out tokens."""
    assert (lse is not None) == (kv.tokens.size > 1)
    assert (shared is None) == (batch.shared is None)
    assert shared is None or spec.window is None, "a window may begin after a prefix"
    tiling = tiling or tiling_of(qkv.dtype, spec.head_dim, kv.block_size)
    shape = Shape.of(spec, kv, qkv.dtype)
    num_chunks = plan.chunks.shape[0]
    _attend_decodes_kernel[(spec.num_kv_heads, num_chunks)](
        qkv,
        out,
        lse,
        kv.keys,
        kv.own_values,
        Rotation.of(spec, rope),
        spec.sinks if shape.has_sinks else None,
        batch.context_lens if lse is not None else None,
        batch.block_tables,
        plan.chunks,
        plan.num_chunks,
        plan.arrivals,
        Partials.empty(num_chunks, spec, qkv.device),
        batch.shared.sequences if batch.shared else None,
        shared,
        batch.block_tables.stride(0),
        spec.scale * kv.key_scale * LOG2_E,
        kv.key_scale,
        kv.value_scale,
        SHAPE=shape,
        STORES=not batch.stores_first,
        SHARED_TILE=batch.shared.tiles.shape[1] if batch.shared else 0,
        PDL=shared is not None and has_pdl(),  # with `attend_shared`; to start before the linears end costs more
        BLOCK_G=triton.next_power_of_2(shape.group),
        BLOCK_M=max(triton.next_power_of_2(shape.group + 1), 16),  # the least that a matrix product takes
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        launch_pdl=shared is not None and has_pdl(),
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["context_lens_ptr", "block_tables_ptr", "shared_sequences_ptr"],
)
def _attend_decodes_kernel(
    qkv_ptr,
    out_ptr,
    lse_ptr,
    keys_ptr,
    values_ptr,
    rotation,
    sinks_ptr,
    context_lens_ptr,
    block_tables_ptr,
    chunks_ptr,
    num_chunks_ptr,
    arrivals_ptr,
    partials,
    shared_sequences_ptr,
    shared_partials,
    table_stride,
    scale,
    key_scale,
    value_scale,
    SHAPE: tl.constexpr,
    STORES: tl.constexpr,
    SHARED_TILE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    D: tl.constexpr = SHAPE.dim
    BLOCK_D: tl.constexpr = SHAPE.block_dim
    GROUP: tl.constexpr = SHAPE.group
    WINDOW: tl.constexpr = SHAPE.window
    kv_head = tl.program_id(0)
    chunk = tl.program_id(1)
    chunk_ptr = chunks_ptr + chunk * 8
    sequence = tl.load(chunk_ptr)
    row = tl.load(chunk_ptr + 1).to(tl.int64)
    place = tl.load(chunk_ptr + 2)  # of the new token, among those that are kept here
    begin = tl.load(chunk_ptr + 3)
    chunk_end = tl.load(chunk_ptr + 4)
    first_chunk = tl.load(chunk_ptr + 5)
    last_chunk = tl.load(chunk_ptr + 6)
    if chunk >= tl.load(num_chunks_ptr):
        wait_for_previous(PDL)
        return
    is_last = chunk == last_chunk
    position = place
    if SHAPE.ranks > 1:
        position = tl.load(context_lens_ptr + sequence) - 1
    is_here = keeps(position, SHAPE)
    oldest = 0
    if WINDOW:
        oldest = kept(oldest_seen(position, SHAPE), SHAPE)
        if chunk_end <= oldest:
            return
        first_chunk += oldest // (chunk_end - begin)
        begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)
    end = tl.minimum(chunk_end, place)  # the new token is not read back
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    # Where the new token is kept elsewhere, the table may end before its place here.
    block = tl.load(table_ptr + begin // SHAPE.block_size, mask=(begin < end) | is_here, other=0)
    home = tl.load(table_ptr + position // SHAPE.table_block_size).to(tl.int64)
    if SHARED_TILE:
        first_piece = tl.load(shared_sequences_ptr + sequence * 3 + 1)
        num_pieces = tl.load(shared_sequences_ptr + sequence * 3 + 2)

    # Rows of q are the heads that share this KV head, and behind them the new token's key; what that one attends to is
    # dropped.
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_query = m < GROUP
    is_key = m == GROUP
    head = tl.where(is_query, kv_head * GROUP + m, SHAPE.num_heads + kv_head)
    token_ptr = qkv_ptr + row * SHAPE.qkv_width
    norms = rotation.q_norm
    if SHAPE.has_norm:
        norms = tl.where(is_query, rotation.q_norm, rotation.k_norm)[:, None]
    positions = tl.zeros([BLOCK_M], tl.int32) + position
    q = load_rotated(token_ptr + head * D, positions, m <= GROUP, rotation, norms, SHAPE)
    v_new = tl.load(token_ptr + (SHAPE.num_heads + SHAPE.num_kv_heads + kv_head) * D + d, mask=d < D, other=0.0)[
        None, :
    ]
    # This step attends to the new token as a later one will read it.
    k_stored = as_stored(q, key_scale, keys_ptr.dtype.element_ty)
    v_stored = as_stored(v_new, value_scale, values_ptr.dtype.element_ty)
    q = tl.where(is_key[:, None], k_stored.to(q.dtype), q)

    acc, total, highest = nothing_yet(BLOCK_M, BLOCK_D)
    if SHAPE.has_sinks:  # once for a sequence: with its new token
        acc, total, highest = sinks_alone(sinks_ptr, head, is_query & is_last, BLOCK_D)
    for start in tl.range(begin, end, BLOCK_N):
        slot = ((block.to(tl.int64) * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + start % SHAPE.block_size) * D
        # A block's id is loaded one turn ahead: the pipeline of tiles must not wait for it.
        block = tl.load(table_ptr + (start + BLOCK_N) // SHAPE.block_size, mask=start + BLOCK_N < end, other=0)
        at = slot + n[:, None] * D + d[None, :]
        seen = start + n < end
        if WINDOW:
            seen &= start + n >= oldest
        mask = seen[:, None] & (d < D)[None, :]  # of values too: a stale slot may hold a NaN
        k = tl.load(keys_ptr + at, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, k.T, input_precision=SHAPE.precision) * scale
        if SHAPE.cap > 0.0:
            scores = capped(scores, SHAPE.cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + at, mask=mask, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision=SHAPE.precision)
        highest = higher

    wait_for_previous(PDL)  # until here nothing was written, and nothing read that `attend_shared` writes
    if SHARED_TILE:
        for piece in range(tl.where(chunk == first_chunk, num_pieces, 0)):
            at = (first_piece + piece * SHARED_TILE) * SHAPE.num_heads + head
            their_acc, their_total, their_highest = load_partial(shared_partials, at, is_query, D, BLOCK_D)
            acc, total, highest = joined(acc, total, highest, their_acc, their_total, their_highest)
    if is_last:
        if STORES:
            slot = (home * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + position % SHAPE.block_size
            at = slot * D + d[None, :]
            is_stored = (d < D)[None, :] & is_here
            tl.store(keys_ptr + at + tl.zeros_like(m)[:, None], k_stored, mask=is_key[:, None] & is_stored)
            tl.store(values_ptr + at, v_stored, mask=is_stored)
        scores = tl.dot(q, q.T, input_precision=SHAPE.precision) * scale
        if SHAPE.cap > 0.0:
            scores = capped(scores, SHAPE.cap)
        score = tl.sum(tl.where(is_key[None, :], scores, 0.0), axis=1)
        if SHAPE.ranks > 1:
            score = tl.where(is_here, score, float("-inf"))
        one = tl.full([BLOCK_M], 1.0, tl.float32)
        acc, total, highest = joined(acc, total, highest, v_stored.to(tl.float32), one, score)

    num_chunks = last_chunk - first_chunk + 1
    out = out_ptr + row * (SHAPE.num_heads * D)
    if num_chunks == 1:
        mask = is_query[:, None] & (d < D)[None, :]
        found = outputs(acc, total, value_scale, SHAPE.ranks > 1)
        tl.store(out + head[:, None] * D + d[None, :], found, mask=mask)
        if SHAPE.ranks > 1:
            tl.store(lse_ptr + row * SHAPE.num_heads + head, log_sum_exp(total, highest), mask=is_query)
        return

    store_partial(partials, chunk * SHAPE.num_heads + head, is_query, acc, total, highest, D, BLOCK_D)
    tl.debug_barrier()  # every thread's part is stored before one thread announces it
    arrival_ptr = arrivals_ptr + sequence * SHAPE.num_kv_heads + kv_head
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_chunks - 1:
        tl.store(arrival_ptr, 0)
        _join_chunks(out, lse_ptr, row, partials, first_chunk, num_chunks, kv_head, value_scale, SHAPE, BLOCK_G)


@triton.jit
def _join_chunks(
    out,
    lse_ptr,
    row,
    partials,
    first_chunk,
    num_chunks,
    kv_head,
    value_scale,
    SHAPE: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Weigh the chunks' results by their share of the softmax. Others wrote them: the L1 cache is passed by."""
    CHUNKS: tl.constexpr = 16  # at a time
    D: tl.constexpr = SHAPE.dim
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, SHAPE.block_dim)
    head = kv_head * SHAPE.group + g
    acc, total, highest = nothing_yet(BLOCK_G, SHAPE.block_dim)
    for base in range(0, num_chunks, CHUNKS):
        c = base + tl.arange(0, CHUNKS)
        at = (first_chunk + c)[:, None] * SHAPE.num_heads + head[None, :]  # [chunks, heads]
        inside = (c < num_chunks)[:, None] & (g < SHAPE.group)[None, :]
        theirs = tl.load(partials.highest + at, mask=inside, other=-1e30, cache_modifier=".cg")
        totals = tl.load(partials.total + at, mask=inside, other=0.0, cache_modifier=".cg")
        mask = inside[:, :, None] & (d < D)[None, None, :]
        values = tl.load(
            partials.acc + at[:, :, None] * D + d[None, None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, tl.max(theirs, axis=0))
        weights = tl.exp2(theirs - higher[None, :])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(totals * weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        highest = higher
    mask = (g < SHAPE.group)[:, None] & (d < D)[None, :]
    tl.store(out + head[:, None] * D + d[None, :], outputs(acc, total, value_scale, SHAPE.ranks > 1), mask=mask)
    if SHAPE.ranks > 1:
        tl.store(lse_ptr + row * SHAPE.num_heads + head, log_sum_exp(total, highest), mask=g < SHAPE.group)
