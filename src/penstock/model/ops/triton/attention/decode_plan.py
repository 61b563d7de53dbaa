"""Plan of a step's decode attention, for any batch: how contexts are cut into chunks, once a step for all layers. One
program computes it on the device: latency is the limit, and was not measured by itself.

The host knows only how many sequences there are. It launches for the most chunks there can be, so nothing is read back,
and a captured graph stays right as contexts grow.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from penstock.model.batch import Batch
from penstock.model.ops.triton.attention.token_split import kept_of
from penstock.model.sequence import TokenSplit

_PROGRAMS_PER_PROCESSOR = 1  # at least, if contexts are long enough to be cut
_CHUNKS_PER_SEQUENCE = 0.75  # at least: only a context a third longer than the average is cut to even out a large batch
SHORTEST_CHUNK = 64


@dataclass(frozen=True)
class DecodePlan:
    """Chunks of one step's decodes; those of a sequence lie together."""

    # [most chunks, 8] int32: sequence, its row in the batch, position of its new token, begin, end, and the sequence's
    # first and last chunk. Each is a multiple of SHORTEST_CHUNK long: the last end may lie behind the context's. Where
    # ranks share out tokens, positions are places among those kept here, and the new token has one wherever it is kept.
    chunks: Tensor
    num_chunks: Tensor  # [1] int32
    arrivals: Tensor  # [sequences * kv_heads] int32, all 0 between launches: chunks that are done


def plan_decodes(
    batch: Batch,
    num_kv_heads: int,
    num_processors: int,
    block_size: int = 1,
    tokens: TokenSplit = TokenSplit(),  # noqa: B008 (frozen)
) -> DecodePlan:
    """Launches one small kernel and reads nothing back. A sequence with a context of 0 is padding and gets no chunk.

    What a sequence shares with others is `attend_shared`'s: only what comes after it is cut.
    """
    wanted = max(
        num_processors * _PROGRAMS_PER_PROCESSOR // num_kv_heads, int(batch.num_sequences * _CHUNKS_PER_SEQUENCE), 1
    )
    like = batch.context_lens
    plan = DecodePlan(
        # Chunks are at least a `wanted`th of all contexts together, but for each sequence's last.
        chunks=like.new_empty(wanted + batch.num_sequences, 8),
        num_chunks=like.new_empty(1),
        arrivals=like.new_empty(batch.num_sequences * num_kv_heads),
    )
    _plan_kernel[(1,)](
        batch.query_starts,
        batch.context_lens,
        batch.shared.sequences if batch.shared else None,
        plan.chunks,
        plan.num_chunks,
        plan.arrivals,
        batch.num_sequences,
        wanted,
        KV_HEADS=num_kv_heads,
        SHORTEST=SHORTEST_CHUNK,
        BLOCK=256,
        BLOCK_SIZE=block_size if tokens.size > 1 else 1,
        PLACE=tokens.place,
        RANKS=tokens.size,
    )
    return plan


@triton.jit(
    do_not_specialize=["num_sequences", "wanted"],
    do_not_specialize_on_alignment=["query_starts_ptr", "context_lens_ptr", "shared_sequences_ptr"],
)
def _plan_kernel(
    query_starts_ptr,
    context_lens_ptr,
    shared_sequences_ptr,
    chunks_ptr,
    num_chunks_ptr,
    arrivals_ptr,
    num_sequences,
    wanted,
    KV_HEADS: tl.constexpr,
    SHORTEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACE: tl.constexpr,
    RANKS: tl.constexpr,
):
    all_tokens = 0
    for base in range(0, num_sequences, BLOCK):
        s, rows, begins, ends = _decodes(
            base,
            query_starts_ptr,
            context_lens_ptr,
            shared_sequences_ptr,
            num_sequences,
            BLOCK,
            BLOCK_SIZE,
            PLACE,
            RANKS,
        )
        all_tokens += tl.sum(ends - begins, axis=0)
        for head in range(KV_HEADS):
            tl.store(arrivals_ptr + s * KV_HEADS + head, 0, mask=s < num_sequences)
    longest = tl.maximum(tl.cdiv(all_tokens, wanted), SHORTEST)

    num_chunks = 0
    for base in range(0, num_sequences, BLOCK):
        s, rows, begins, ends = _decodes(
            base,
            query_starts_ptr,
            context_lens_ptr,
            shared_sequences_ptr,
            num_sequences,
            BLOCK,
            BLOCK_SIZE,
            PLACE,
            RANKS,
        )
        # Chunks: as many as `longest` asks for, but of one length.
        counts = tl.cdiv(ends - begins, longest)
        chunk_lens = tl.cdiv(tl.cdiv(ends - begins, tl.maximum(counts, 1)), SHORTEST) * SHORTEST
        counts = tl.cdiv(ends - begins, tl.maximum(chunk_lens, 1))
        firsts = num_chunks + tl.cumsum(counts, axis=0) - counts
        for i in range(tl.max(counts, axis=0)):
            inside = i < counts
            chunk_ptr = chunks_ptr + (firsts + i) * 8
            tl.store(chunk_ptr, s, mask=inside)
            tl.store(chunk_ptr + 1, rows, mask=inside)
            tl.store(chunk_ptr + 2, ends - 1, mask=inside)
            tl.store(chunk_ptr + 3, begins + i * chunk_lens, mask=inside)
            tl.store(chunk_ptr + 4, begins + (i + 1) * chunk_lens, mask=inside)
            tl.store(chunk_ptr + 5, firsts, mask=inside)
            tl.store(chunk_ptr + 6, firsts + counts - 1, mask=inside)
        num_chunks += tl.sum(counts, axis=0)
    tl.store(num_chunks_ptr, num_chunks)


@triton.jit
def _decodes(
    base,
    query_starts_ptr,
    context_lens_ptr,
    shared_sequences_ptr,
    num_sequences,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PLACE: tl.constexpr,
    RANKS: tl.constexpr,
):
    """BLOCK sequences: their rows in the batch, where their own part of the context begins, and where it ends.

    That is at 0 where a sequence is no decode.
    """
    s = base + tl.arange(0, BLOCK)
    inside = s < num_sequences
    rows = tl.load(query_starts_ptr + s, mask=inside, other=0)
    next_rows = tl.load(query_starts_ptr + s + 1, mask=inside, other=0)
    begins = tl.zeros([BLOCK], tl.int32)
    if shared_sequences_ptr is not None:
        begins = tl.load(shared_sequences_ptr + s * 3, mask=inside, other=0)
    ends = tl.load(context_lens_ptr + s, mask=inside, other=0)
    if RANKS > 1:
        ends = tl.where(ends > 0, kept_of(tl.maximum(ends - 1, 0), BLOCK_SIZE, PLACE, RANKS) + 1, 0)
    return s, rows, begins, tl.where(next_rows - rows == 1, ends, 0)
