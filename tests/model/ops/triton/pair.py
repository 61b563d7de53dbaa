"""One paged cache twice, in the GPU's layout and in the reference's: what the one finds is held to the other.

On a GPU, or on none interpreted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from penstock.model.batch import Batch, SharedPrefixes
from penstock.model.ops import AttentionSpec, KVShape, LayerKV, Rope
from penstock.model.ops.reference import ReferenceOps
from penstock.model.ops.triton import TritonOps
from penstock.model.sequence import TokenSplit
from tests.devices import DEVICE, IS_INTERPRETED, matrix
from tests.model.paged import PagedSequence, make_batch

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ONE_DTYPE = pytest.mark.parametrize("dtype", matrix(list(TOLERANCES), [torch.float32]), ids=str)


LAYERS = 1 if IS_INTERPRETED else 2  # of a step


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCES[theirs.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    norm: bool = False
    cap: float | None = None
    in_chunks: bool = False
    value_dim: int | None = None  # values are a part of keys
    has_sinks: bool = False

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        def weight() -> torch.Tensor | None:
            return torch.randn(self.head_dim, device=DEVICE).to(dtype) if self.norm else None

        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.window,
            weight(),
            weight(),
            cap=self.cap,
            in_chunks=self.in_chunks,
            value_dim=self.value_dim,
            # Around the scores' size, far below it and far above.
            sinks=torch.randn(self.num_heads, device=DEVICE) * 6 if self.has_sinks else None,
        )


def rope(head_dim: int, context: int = 8192) -> Rope:
    angles = torch.outer(torch.arange(context).float(), 0.5 ** torch.arange(head_dim // 2).float()).to(DEVICE)
    return Rope(angles.cos(), angles.sin())


@dataclass
class Both:
    """One paged cache twice, in our layout and in the reference's, with the same random content."""

    heads: Heads
    dtype: torch.dtype
    block_size: int
    num_blocks: int
    kv_dtype: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)  # of keys and values
    tokens: TokenSplit = TokenSplit()  # noqa: RUF009 (frozen): of each sequence, those that the cache keeps

    def __post_init__(self) -> None:
        self.ours = TritonOps(DEVICE, self.dtype, kv_dtype=self.kv_dtype)
        self.theirs = ReferenceOps(DEVICE, self.dtype, kv_dtype=self.kv_dtype)
        heads = self.heads
        sizes = heads.num_kv_heads, heads.head_dim
        shape = KVShape(2, self.num_blocks, self.block_size, *sizes, self.tokens, heads.value_dim)
        self.table_block_size = shape.table_block_size
        self.our_kv, self.their_kv = (
            replace(ops.allocate_kv(shape)[1], key_scale=self.scales[0], value_scale=self.scales[1])
            for ops in (self.ours, self.theirs)
        )
        for mine, other in zip(tensors(self.our_kv), tensors(self.their_kv), strict=True):
            mine.copy_(torch.randn(mine.shape, device=DEVICE))
            other.copy_(mine.transpose(1, 2))
        self.free = random.Random(0).sample(range(self.num_blocks), self.num_blocks)

    def work(self, lengths: list[tuple[int, int]]) -> list[tuple[PagedSequence, int]]:
        """Sequences of (tokens computed, tokens to come), in scattered blocks."""
        found = []
        for computed, count in lengths:
            blocks = [self.free.pop() for _ in range(-(-(computed + count) // self.table_block_size))]
            found.append((PagedSequence([0] * (computed + count), blocks, computed), count))
        return found

    def check(
        self, work: list[tuple[PagedSequence, int]], shared: SharedPrefixes | None = None, *, layers: int = LAYERS
    ) -> None:
        spec, angles = self.heads.spec(self.dtype), self.rope()
        batch = replace(make_batch(work, device=DEVICE), shared=shared)
        self.ours.begin(batch)
        qkv = self.qkv(batch.num_tokens)  # as in a step: the plan is complete before a layer begins
        for _ in range(layers):  # the second layer finds the plan as the first one left it
            ours = self.ours.attention(qkv, spec, angles, self.our_kv, batch)
        self.theirs.begin(batch)
        theirs = self.theirs.attention(qkv, spec, angles, self.their_kv, batch)
        close(ours, theirs)
        for sequence, count in work:
            if count > 1 and self.their_kv.values is not None:  # values behind a chunk's end are cleared
                self.their_kv.values[sequence.blocks[-1], (sequence.computed + count - 1) % self.block_size + 1 :] = 0.0
        for mine, other in zip(tensors(self.our_kv), tensors(self.their_kv), strict=True):
            close(mine.transpose(1, 2).to(self.dtype), other.to(self.dtype))

    # In FP8 what differs by the last bit may become numbers that differ by an eighth, and the interpreter cuts where
    # the hardware rounds. So new keys and values are FP8 numbers already, and rotation leaves them as they are.

    def rope(self) -> Rope:
        angles = rope(self.heads.head_dim - (self.heads.value_dim or 0))
        return Rope(torch.ones_like(angles.cos), torch.zeros_like(angles.sin)) if self.kv_dtype else angles

    def qkv(self, num_tokens: int) -> torch.Tensor:
        own = 2 if self.heads.value_dim is None else 1
        width = (self.heads.num_heads + own * self.heads.num_kv_heads) * self.heads.head_dim
        numbers = torch.randn(num_tokens, width, device=DEVICE).to(self.dtype)
        return numbers.to(self.kv_dtype).to(self.dtype) if self.kv_dtype else numbers


def tensors(kv: LayerKV) -> tuple[torch.Tensor, ...]:
    return kv.caches


def padded(batch: Batch) -> Batch:
    """Returns the batch with one more sequence, of one token and no context."""
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    return replace(
        batch,
        token_ids=torch.cat((batch.token_ids, zero)),
        positions=torch.cat((batch.positions, zero)),
        query_starts=torch.cat((batch.query_starts, batch.query_starts[-1:] + 1)),
        context_lens=torch.cat((batch.context_lens, zero)),
        block_tables=torch.cat((batch.block_tables, batch.block_tables[:1] * 0)),
        num_decodes=batch.num_decodes + 1,
    )
