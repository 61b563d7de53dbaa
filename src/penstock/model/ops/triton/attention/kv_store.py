"""Keys and values of a step into the paged cache: of prefill chunks, and of single tokens where others of their step
attend to them (drafts). Writing them is the limit: memory's bandwidth for chunks, the start of a kernel for single
tokens. The share was not measured by itself.

Tiles of a chunk are laid out here too: `prefill` has the same.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops import AttentionSpec, LayerKV, Rope
from penstock.model.ops.triton.attention.rope import (
    BATCH_NUMBERS,
    BATCH_POINTERS,
    Rotation,
    Shape,
    as_stored,
    load_rotated,
)
from penstock.model.ops.triton.attention.token_split import keeps, kept

_TOKENS = 32  # that one program stores
_SINGLES = 4  # sequences of one token that one program stores


def store_chunks(qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> None:
    """Keys and values of every sequence that brings more than one token."""
    num_tiles = batch.num_tokens // _TOKENS + batch.num_sequences
    _store(num_tiles, _TOKENS, qkv, spec, rope, kv, batch, singles=False)


def store_singles(qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch) -> None:
    """Keys and values of every sequence that brings one token, where `decode` does not store them itself."""
    num_tiles = triton.cdiv(batch.num_sequences, _SINGLES)
    _store(num_tiles, _SINGLES, qkv, spec, rope, kv, batch, singles=True)


def _store(
    num_tiles: int,
    tokens: int,
    qkv: Tensor,
    spec: AttentionSpec,
    rope: Rope,
    kv: LayerKV,
    batch: Batch,
    *,
    singles: bool,
) -> None:
    _store_kernel[(num_tiles, spec.num_kv_heads)](
        qkv,
        kv.keys,
        kv.own_values,
        kv.key_scale,
        kv.value_scale,
        Rotation.of(spec, rope),
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.block_tables.stride(0),
        batch.num_sequences,
        SHAPE=Shape.of(spec, kv, qkv.dtype),
        SINGLES=singles,
        TOKENS=tokens,
        num_warps=4,
    )


@triton.jit
def chunk_of(tile, query_starts_ptr, num_sequences, QUERIES: tl.constexpr):
    """A tile's sequence, its first query within it, the sequence's first row in the batch and number of rows. Tiles
    are of QUERIES tokens, and no tile is shared by two sequences.

    Sequence s owns the tiles from query_starts[s] // QUERIES + s on: that leaves each enough, at times one to spare.
    """
    STEP: tl.constexpr = 256
    sequence = -1
    for base in range(0, num_sequences, STEP):
        s = base + tl.arange(0, STEP)
        starts = tl.load(query_starts_ptr + s, mask=s < num_sequences, other=0)
        sequence += tl.sum(((s < num_sequences) & (starts // QUERIES + s <= tile)).to(tl.int32), axis=0)
    first_tile = tl.load(query_starts_ptr + sequence) // QUERIES + sequence
    first = (tile - first_tile) * QUERIES
    row = tl.load(query_starts_ptr + sequence)
    return sequence, first, row, tl.load(query_starts_ptr + sequence + 1) - row


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _store_kernel(
    qkv_ptr,
    keys_ptr,
    values_ptr,
    key_scale,
    value_scale,
    rotation,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    SHAPE: tl.constexpr,
    SINGLES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One head's keys and values of TOKENS rows of qkv: of consecutive ones of a chunk, or of as many sequences that
    bring one each."""
    D: tl.constexpr = SHAPE.dim
    kv_head = tl.program_id(1)
    if SINGLES:
        sequence = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        inside = sequence < num_sequences
        row = tl.load(query_starts_ptr + sequence, mask=inside, other=0)
        next_row = tl.load(query_starts_ptr + sequence + 1, mask=inside, other=0)
        positions = tl.load(context_lens_ptr + sequence, mask=inside, other=0) - 1
        inside &= (next_row - row == 1) & (positions >= 0)
    else:
        sequence, first, row, query_len = chunk_of(tl.program_id(0), query_starts_ptr, num_sequences, TOKENS)
        if (query_len == 1) | (first >= query_len):
            return
        context = tl.load(context_lens_ptr + sequence)
        token = first + tl.arange(0, TOKENS)
        inside = token < query_len
        positions = context - query_len + token
        row += token
    if SHAPE.ranks > 1:
        inside &= keeps(positions, SHAPE)
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride  # of one sequence, or of each row's
    key_heads = qkv_ptr + row.to(tl.int64) * SHAPE.qkv_width + (SHAPE.num_heads + kv_head) * D
    d = tl.arange(0, SHAPE.block_dim)[None, :]
    mask = inside[:, None] & (d < D)
    keys = load_rotated(key_heads, positions, inside, rotation, rotation.k_norm, SHAPE)
    values = tl.load(key_heads[:, None] + SHAPE.num_kv_heads * D + d, mask=mask)
    blocks = tl.load(table_ptr + positions // SHAPE.table_block_size, mask=inside, other=0).to(tl.int64)
    slots = (blocks * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + positions % SHAPE.block_size
    at = slots[:, None] * D + d
    tl.store(keys_ptr + at, as_stored(keys, key_scale, keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + at, as_stored(values, value_scale, values_ptr.dtype.element_ty), mask=mask)
    if not SINGLES and first + TOKENS >= query_len:
        _clear_rest(values_ptr, table_ptr, kept(context, SHAPE), kv_head, SHAPE, TOKENS)


@triton.jit
def _clear_rest(values_ptr, table_ptr, context, kv_head, SHAPE: tl.constexpr, SLOTS: tl.constexpr):
    """Zero the values behind a context's end: they meet weights of zero, and zero times a stray NaN is NaN. `context`:
    tokens of it that are kept here."""
    BLOCK_D: tl.constexpr = SHAPE.block_dim
    d = tl.arange(0, BLOCK_D)[None, :]
    used = context % SHAPE.block_size
    block = tl.load(table_ptr + context // SHAPE.block_size, mask=used > 0, other=0).to(tl.int64)
    nothing = tl.zeros([SLOTS, BLOCK_D], tl.float32).to(values_ptr.dtype.element_ty)
    for base in range(used, tl.where(used > 0, SHAPE.block_size, 0), SLOTS):
        slot = base + tl.arange(0, SLOTS)[:, None]
        at = ((block * SHAPE.num_kv_heads + kv_head) * SHAPE.block_size + slot) * SHAPE.dim + d
        tl.store(values_ptr + at, nothing, mask=(slot < SHAPE.block_size) & (d < SHAPE.dim))
