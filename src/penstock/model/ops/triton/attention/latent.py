"""Attention over latents (MLA): one head of keys, of which the value is a part, for prompts and single tokens, any
batch, any context, any number of heads. Not measured yet; the limit of decodes is to be memory's bandwidth, since all
heads share what is read, and that of prompts the products.

Keys are stored before anything attends, so a step's own tokens are read as any other's. A program takes some heads of
some queries of one sequence and one piece of its context; where a context has several pieces, a second kernel joins
what they found. Sums of latents are as wide as the value, so the rotated part of a key is multiplied by itself.
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
from penstock.model.ops.triton.attention.decode_plan import DecodePlan
from penstock.model.ops.triton.attention.kv_store import chunk_of
from penstock.model.ops.triton.attention.online_softmax import LOG2_E, Partials, nothing_yet, outputs
from penstock.model.ops.triton.attention.prefill import keys_per_tile
from penstock.model.ops.triton.attention.rope import BATCH_NUMBERS, BATCH_POINTERS
from penstock.model.ops.triton.common.tiling import Tiling

_STORED = 16  # tokens that one program stores
_JOINED = 16  # pieces that are joined at a time


@dataclass(frozen=True)
class LatentShape:
    """Constants that these kernels are compiled for."""

    num_heads: int
    value_dim: int  # the part of a key that is also the value
    rotary_dim: int  # the part behind it, which only scores use
    block_value: int  # powers of two, and 16 are the least that a matrix product takes
    block_rotary: int
    block_size: int
    precision: str

    @classmethod
    def of(cls, spec: AttentionSpec, kv: LayerKV, dtype: torch.dtype) -> LatentShape:
        assert spec.value_dim is not None
        assert spec.num_kv_heads == 1
        rotary = spec.head_dim - spec.value_dim
        return cls(
            num_heads=spec.num_heads,
            value_dim=spec.value_dim,
            rotary_dim=rotary,
            block_value=max(triton.next_power_of_2(spec.value_dim), 16),
            block_rotary=max(triton.next_power_of_2(rotary), 16),
            block_size=kv.block_size,
            precision="ieee" if dtype is torch.float32 else "tf32",
        )

    @property
    def dim(self) -> int:
        return self.value_dim + self.rotary_dim

    @property
    def width(self) -> int:
        """Numbers of a row of queries and its key."""
        return (self.num_heads + 1) * self.dim


def tiling_of(dtype: torch.dtype, block_size: int) -> Tiling:
    """Rows of a program are heads of one query, or of several queries of a prompt."""
    if dtype is torch.float32:
        return Tiling(block_m=16, block_n=keys_per_tile(block_size, 16), num_warps=4, num_stages=1)
    return Tiling(block_m=64, block_n=keys_per_tile(block_size, 32), num_warps=8, num_stages=2)


def attend_latents(
    qkv: Tensor, spec: AttentionSpec, rope: Rope, kv: LayerKV, batch: Batch, plan: DecodePlan | None, out: Tensor
) -> None:
    """`qkv` [tokens, (heads + 1) * dim]; `out` [tokens, heads * value_dim]; `plan`: of the sequences that bring one
    token, if there are any."""
    shape, tiling = LatentShape.of(spec, kv, qkv.dtype), tiling_of(qkv.dtype, kv.block_size)
    tables = batch.query_starts, batch.context_lens, batch.block_tables
    numbers = batch.block_tables.stride(0), batch.num_sequences
    turned = qkv.new_empty(batch.num_tokens, shape.num_heads + 1, shape.rotary_dim)
    _rotate_kernel[(batch.num_tokens, triton.cdiv(shape.num_heads + 1, _STORED))](
        qkv, turned, rope.cos, rope.sin, batch.positions, SHAPE=shape, HEADS=_STORED, num_warps=2
    )
    num_tiles = batch.num_tokens // _STORED + batch.num_sequences
    _store_latents_kernel[(num_tiles,)](
        qkv, turned, kv.keys, *tables, *numbers, SHAPE=shape, TOKENS=_STORED, num_warps=4
    )
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    scale, heads = spec.scale * LOG2_E, min(max(triton.next_power_of_2(shape.num_heads), 16), tiling.block_m)
    head_tiles = triton.cdiv(shape.num_heads, heads)
    if batch.num_decodes < batch.num_sequences:
        queries = tiling.block_m // heads
        grid = (head_tiles, batch.num_tokens // queries + batch.num_sequences)
        _latent_chunks_kernel[grid](
            qkv,
            turned,
            out,
            kv.keys,
            *tables,
            *numbers,
            scale,
            SHAPE=shape,
            HEADS=heads,
            QUERIES=queries,
            BLOCK_N=tiling.block_n,
            **options,
        )
    if plan is None:
        return
    num_chunks = plan.chunks.shape[0]
    partials = Partials.of_width(num_chunks, spec.num_heads, shape.value_dim, qkv.device)
    _latent_decodes_kernel[(head_tiles, num_chunks)](
        qkv,
        turned,
        out,
        kv.keys,
        batch.block_tables,
        plan.chunks,
        plan.num_chunks,
        partials,
        batch.block_tables.stride(0),
        scale,
        SHAPE=shape,
        HEADS=heads,
        BLOCK_N=tiling.block_n,
        **options,
    )
    _join_latents_kernel[(shape.num_heads, num_chunks)](
        out, plan.chunks, plan.num_chunks, partials, SHAPE=shape, CHUNKS=_JOINED, num_warps=4
    )


@triton.jit
def _rotate_kernel(qkv_ptr, turned_ptr, cos_ptr, sin_ptr, positions_ptr, SHAPE: tl.constexpr, HEADS: tl.constexpr):
    """Ends of the queries and of the key of one token, rotated, into a tensor of their own."""
    HALF: tl.constexpr = SHAPE.rotary_dim // 2
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, SHAPE.block_rotary)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + d, mask=d < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + d, mask=d < HALF, other=0.0)[None, :]
    at = qkv_ptr + token.to(tl.int64) * SHAPE.width + head[:, None] * SHAPE.dim + SHAPE.value_dim + d[None, :]
    mask = (head <= SHAPE.num_heads)[:, None] & (d < HALF)[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    line = token.to(tl.int64) * (SHAPE.num_heads + 1) + head[:, None]
    to = turned_ptr + line * SHAPE.rotary_dim + d[None, :]
    tl.store(to, first * cos - second * sin, mask=mask)
    tl.store(to + HALF, second * cos + first * sin, mask=mask)


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _store_latents_kernel(
    qkv_ptr,
    turned_ptr,
    keys_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    SHAPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Keys of consecutive tokens of one sequence."""
    D: tl.constexpr = SHAPE.dim
    sequence, first, row, query_len = chunk_of(tl.program_id(0), query_starts_ptr, num_sequences, TOKENS)
    context = tl.load(context_lens_ptr + sequence)
    if (first >= query_len) | (context == 0):
        return
    token = first + tl.arange(0, TOKENS)
    inside = token < query_len
    positions = context - query_len + token
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * table_stride
    blocks = tl.load(table_ptr + positions // SHAPE.block_size, mask=inside, other=0).to(tl.int64)
    to = keys_ptr + (blocks * SHAPE.block_size + positions % SHAPE.block_size)[:, None] * D
    rows = (row + token).to(tl.int64)[:, None]
    source = qkv_ptr + rows * SHAPE.width + SHAPE.num_heads * D
    v = tl.arange(0, SHAPE.block_value)[None, :]
    mask = inside[:, None] & (v < SHAPE.value_dim)
    tl.store(to + v, tl.load(source + v, mask=mask), mask=mask)
    r = tl.arange(0, SHAPE.block_rotary)[None, :]
    mask = inside[:, None] & (r < SHAPE.rotary_dim)
    source = turned_ptr + (rows * (SHAPE.num_heads + 1) + SHAPE.num_heads) * SHAPE.rotary_dim
    tl.store(to + SHAPE.value_dim + r, tl.load(source + r, mask=mask), mask=mask)


@triton.jit
def _attend(
    qkv_ptr,
    turned_ptr,
    rows,
    head,
    inside,
    ends,
    begin,
    end,
    keys_ptr,
    table_ptr,
    scale,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Result of these heads of rows over the keys from `begin` to `end`: each row sees those before its own of
    `ends`. Tiles never span two blocks."""
    V: tl.constexpr = SHAPE.value_dim
    R: tl.constexpr = SHAPE.rotary_dim
    n = tl.arange(0, BLOCK_N)
    v = tl.arange(0, SHAPE.block_value)
    r = tl.arange(0, SHAPE.block_rotary)
    queries = qkv_ptr + rows * SHAPE.width + head * SHAPE.dim
    q = tl.load(queries[:, None] + v[None, :], mask=inside[:, None] & (v < V)[None, :], other=0.0)
    queries = turned_ptr + (rows * (SHAPE.num_heads + 1) + head) * R
    q_turned = tl.load(queries[:, None] + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
    acc, total, highest = nothing_yet(ROWS, SHAPE.block_value)
    for start in tl.range(begin, end, BLOCK_N):
        block = tl.load(table_ptr + start // SHAPE.block_size).to(tl.int64)
        keys = keys_ptr + (block * SHAPE.block_size + start % SHAPE.block_size + n)[:, None] * (V + R)
        is_key = start + n < end  # a stale slot may hold a NaN
        k = tl.load(keys + v[None, :], mask=is_key[:, None] & (v < V)[None, :], other=0.0)
        k_turned = tl.load(keys + V + r[None, :], mask=is_key[:, None] & (r < R)[None, :], other=0.0)
        scores = tl.dot(q, k.T, input_precision=SHAPE.precision)
        scores = tl.dot(q_turned, k_turned.T, scores, input_precision=SHAPE.precision) * scale
        seen = is_key[None, :] & (start + n[None, :] < ends[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(k.dtype), k, acc * decay[:, None], input_precision=SHAPE.precision)
        highest = higher
    return acc, total, highest


@triton.jit(do_not_specialize=BATCH_NUMBERS, do_not_specialize_on_alignment=BATCH_POINTERS)
def _latent_chunks_kernel(
    qkv_ptr,
    turned_ptr,
    out_ptr,
    keys_ptr,
    query_starts_ptr,
    context_lens_ptr,
    block_tables_ptr,
    table_stride,
    num_sequences,
    scale,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """HEADS heads of QUERIES consecutive queries of a sequence that brings more than one token."""
    ROWS: tl.constexpr = HEADS * QUERIES
    # The longest contexts start first: programs are started from the last tile down.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence, first, row, query_len = chunk_of(tile, query_starts_ptr, num_sequences, QUERIES)
    if (query_len == 1) | (first >= query_len):
        return
    before = tl.load(context_lens_ptr + sequence) - query_len
    m = tl.arange(0, ROWS)
    query, head = first + m // HEADS, tl.program_id(0) * HEADS + m % HEADS
    inside = (query < query_len) & (head < SHAPE.num_heads)
    rows = (row + query).to(tl.int64)
    acc, total, _ = _attend(
        qkv_ptr,
        turned_ptr,
        rows,
        head,
        inside,
        before + query + 1,
        0,
        before + tl.minimum(first + QUERIES, query_len),
        keys_ptr,
        block_tables_ptr + sequence.to(tl.int64) * table_stride,
        scale,
        SHAPE,
        ROWS,
        BLOCK_N,
    )
    v = tl.arange(0, SHAPE.block_value)[None, :]
    at = (rows * SHAPE.num_heads + head)[:, None] * SHAPE.value_dim + v
    tl.store(out_ptr + at, outputs(acc, total, 1.0, False), mask=inside[:, None] & (v < SHAPE.value_dim))


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables_ptr"])
def _latent_decodes_kernel(
    qkv_ptr,
    turned_ptr,
    out_ptr,
    keys_ptr,
    block_tables_ptr,
    chunks_ptr,
    num_chunks_ptr,
    partials,
    table_stride,
    scale,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """HEADS heads of one token, and one piece of its context (split-KV)."""
    chunk = tl.program_id(1)
    if chunk >= tl.load(num_chunks_ptr):
        return
    chunk_ptr = chunks_ptr + chunk * 8
    sequence = tl.load(chunk_ptr)
    row = tl.load(chunk_ptr + 1).to(tl.int64)
    end = tl.minimum(tl.load(chunk_ptr + 4), tl.load(chunk_ptr + 2) + 1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    inside = head < SHAPE.num_heads
    acc, total, highest = _attend(
        qkv_ptr,
        turned_ptr,
        row + tl.zeros_like(head),
        head,
        inside,
        tl.zeros([HEADS], tl.int32) + end,
        tl.load(chunk_ptr + 3),
        end,
        keys_ptr,
        block_tables_ptr + sequence.to(tl.int64) * table_stride,
        scale,
        SHAPE,
        HEADS,
        BLOCK_N,
    )
    v = tl.arange(0, SHAPE.block_value)[None, :]
    mask = inside[:, None] & (v < SHAPE.value_dim)
    if tl.load(chunk_ptr + 5) == tl.load(chunk_ptr + 6):  # it is the only piece
        at = (row * SHAPE.num_heads + head)[:, None] * SHAPE.value_dim + v
        tl.store(out_ptr + at, outputs(acc, total, 1.0, False), mask=mask)
        return
    at = chunk * SHAPE.num_heads + head
    tl.store(partials.acc + at[:, None].to(tl.int64) * SHAPE.value_dim + v, acc, mask=mask)
    tl.store(partials.total + at, total, mask=inside)
    tl.store(partials.highest + at, highest, mask=inside)


@triton.jit
def _join_latents_kernel(out_ptr, chunks_ptr, num_chunks_ptr, partials, SHAPE: tl.constexpr, CHUNKS: tl.constexpr):
    """One head's pieces of a sequence, weighed by their share of the softmax: by the program of its first piece."""
    head, first = tl.program_id(0), tl.program_id(1)
    if first >= tl.load(num_chunks_ptr):
        return
    chunk_ptr = chunks_ptr + first * 8
    num_chunks = tl.load(chunk_ptr + 6) - first + 1
    if (tl.load(chunk_ptr + 5) != first) | (num_chunks == 1):
        return
    BLOCK_V: tl.constexpr = SHAPE.block_value
    v = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    total, highest = tl.zeros([1], tl.float32), tl.full([1], -1e30, tl.float32)
    for base in range(0, num_chunks, CHUNKS):
        c = base + tl.arange(0, CHUNKS)
        inside = c < num_chunks
        at = (first + c) * SHAPE.num_heads + head
        theirs = tl.load(partials.highest + at, mask=inside, other=-1e30)
        totals = tl.load(partials.total + at, mask=inside, other=0.0)
        mask = inside[:, None] & (v < SHAPE.value_dim)[None, :]
        values = tl.load(partials.acc + at[:, None].to(tl.int64) * SHAPE.value_dim + v[None, :], mask=mask, other=0.0)
        higher = tl.maximum(highest, tl.max(theirs, axis=0))
        weights = tl.exp2(theirs - higher)
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(totals * weights, axis=0)
        acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
        highest = higher
    row = tl.load(chunk_ptr + 1).to(tl.int64)
    at = (row * SHAPE.num_heads + head) * SHAPE.value_dim + v
    tl.store(out_ptr + at, acc / total, mask=v < SHAPE.value_dim)
