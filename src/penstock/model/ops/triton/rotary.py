"""Heads as attention wants them, normed and rotated while they are loaded; keys and values into the cache.

A cache tensor is [num_blocks, kv_heads, block_size, head_dim]: what one program reads of a block lies in one piece.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope

# A step's integers are views of one buffer, at any offset and of any number: no kernel is compiled anew for them.
BATCH_POINTERS = ["query_starts_ptr", "context_lens_ptr", "block_tables_ptr"]
BATCH_NUMBERS = ["table_stride", "num_sequences"]

_TOKENS = 32  # that one program stores


def store_chunks(qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> None:
    """Keys and values of every sequence that brings more than one token; `decode` stores the others' itself."""
    grid = (batch.num_tokens // _TOKENS + batch.num_sequences, spec.num_kv_heads)
    _store_chunks_kernel[grid](
        qkv,
        kv.keys,
        kv.values,
        rope.cos,
        rope.sin,
        spec.k_norm,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.num_sequences,
        spec.norm_eps,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        D=spec.head_dim,
        BLOCK_SIZE=kv.block_size,
        NORM=spec.k_norm is not None,
        TOKENS=_TOKENS,
        BLOCK_D=triton.next_power_of_2(spec.head_dim),
        num_warps=4,
    )


@triton.jit
def load_rotated(
    heads, positions, inside, cos_ptr, sin_ptr, norms, eps, D: tl.constexpr, NORM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Heads [rows, BLOCK_D] from pointers to their first elements [rows], in the type they are stored in.

    `norms` is a norm's weights, or such pointers [rows, 1] if rows have different ones.
    """
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK_D)
    is_first = d < HALF
    angle = tl.where(is_first, d, d - HALF)
    partner = tl.where(is_first, d + HALF, d - HALF)
    mask = inside[:, None] & (d < D)[None, :]
    dtype = heads.dtype.element_ty
    x = tl.load(heads[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x_weight = tl.load(norms + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        y_weight = tl.load(norms + partner[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        # Rounded where the reference rounds.
        x = (x_weight * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y_weight * (y * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    at = positions[:, None] * HALF + angle[None, :]
    cos = tl.load(cos_ptr + at, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0)
    return (x * cos + y * tl.where(is_first[None, :], -sin, sin)).to(dtype)


@triton.jit
def locate(tile, query_starts_ptr, num_sequences, QUERIES: tl.constexpr):
    """(sequence, its first query in this tile): tiles of QUERIES tokens, no tile shared by two sequences.

    Sequence s owns the tiles from query_starts[s] // QUERIES + s on: that leaves each enough, at times one to spare.
    """
    STEP: tl.constexpr = 256
    sequence = -1
    for base in range(0, num_sequences, STEP):
        s = base + tl.arange(0, STEP)
        starts = tl.load(query_starts_ptr + s, mask=s < num_sequences, other=0)
        sequence += tl.sum(((s < num_sequences) & (starts // QUERIES + s <= tile)).to(tl.int32), axis=0)
    first_tile = tl.load(query_starts_ptr + sequence) // QUERIES + sequence
    return sequence, (tile - first_tile) * QUERIES


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _store_chunks_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    cos_ptr,
    sin_ptr,
    norm_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    kv_head = tl.program_id(1)
    sequence, first = locate(tl.program_id(0), query_starts_ptr, num_sequences, TOKENS)
    begin = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - begin
    if (query_len == 1) | (first >= query_len):
        return
    context = tl.load(context_lens_ptr + sequence)
    token = first + tl.arange(0, TOKENS)
    inside = token < query_len
    positions = context - query_len + token
    rows = (begin + token).to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
    key_heads = qkv_ptr + rows + (HEADS + kv_head) * D
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = inside[:, None] & (d < D)
    keys = load_rotated(key_heads, positions, inside, cos_ptr, sin_ptr, norm_ptr, eps, D, NORM, BLOCK_D)
    values = tl.load(key_heads[:, None] + KV_HEADS * D + d, mask=mask)

    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    slots = ((blocks * KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE)[:, None] * D + d
    tl.store(keys_ptr + slots, keys, mask=mask)
    tl.store(values_ptr + slots, values, mask=mask)
    if first + TOKENS >= query_len:
        _clear_rest(values_ptr, table_ptr, context, kv_head, KV_HEADS, D, BLOCK_SIZE, TOKENS, BLOCK_D)


@triton.jit
def _clear_rest(
    values_ptr,
    table_ptr,
    context,
    kv_head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Zero the values behind a context's end: they meet weights of zero, and zero times a stray NaN is NaN."""
    d = tl.arange(0, BLOCK_D)[None, :]
    block = tl.load(table_ptr + (context - 1) // BLOCK_SIZE).to(tl.int64)
    for base in range((context - 1) % BLOCK_SIZE + 1, BLOCK_SIZE, SLOTS):
        slot = base + tl.arange(0, SLOTS)[:, None]
        at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + slot) * D + d
        tl.store(values_ptr + at, 0.0, mask=(slot < BLOCK_SIZE) & (d < D))
