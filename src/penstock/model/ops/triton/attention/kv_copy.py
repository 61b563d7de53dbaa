"""Blocks of the paged cache gathered into a buffer and scattered back, for their way to host memory: a block is a piece
per layer in the cache, and one piece in the buffer. Scattered blocks travel at 95 to 97 % of the bus
(docs/benchmarks.md, KV blocks in host memory). Blocks of one cache are copied to another, perhaps another process's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # that one program copies


def as_words(pool: Tensor) -> Tensor:
    """[parts, num_blocks, words] of [layers, 2, num_blocks, …]: a block has a part in each layer's keys and values."""
    layers, two, num_blocks = pool.shape[:3]
    return pool.view(layers * two, num_blocks, -1).view(torch.int32)


def gather_blocks(pool: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    """`packed` [blocks, parts, words]: its first become the blocks of these ids."""
    _launch(pool, block_ids, packed, gathers=True)


def scatter_blocks(packed: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """The way back."""
    _launch(pool, block_ids, packed, gathers=False)


def copy_between(source: Tensor, theirs: Tensor, target: Tensor, ours: Tensor) -> None:
    """Blocks of one pool become blocks of another, which has as many parts and words, and any number of blocks."""
    parts, _, words = target.shape
    assert (source.shape[0], source.shape[2]) == (parts, words)
    assert theirs.shape == ours.shape
    grid = (ours.shape[0], parts, triton.cdiv(words, _WORDS))
    sizes = source.shape[1], target.shape[1], words
    _copy_between_kernel[grid](source, theirs, target, ours, *sizes, BLOCK=_WORDS, num_warps=8)


def _launch(pool: Tensor, block_ids: Tensor, packed: Tensor, *, gathers: bool) -> None:
    parts, num_blocks, words = pool.shape
    assert packed.shape[1:] == (parts, words)
    assert block_ids.shape[0] <= packed.shape[0]
    grid = (block_ids.shape[0], parts, triton.cdiv(words, _WORDS))
    _copy_kernel[grid](pool, block_ids, packed, num_blocks, words, GATHERS=gathers, BLOCK=_WORDS, num_warps=8)


@triton.jit
def _copy_kernel(pool_ptr, ids_ptr, packed_ptr, num_blocks, words, GATHERS: tl.constexpr, BLOCK: tl.constexpr):
    number, part = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    block = tl.load(ids_ptr + number).to(tl.int64)
    in_pool = pool_ptr + (part.to(tl.int64) * num_blocks + block) * words + column
    in_packed = packed_ptr + (number.to(tl.int64) * tl.num_programs(1) + part) * words + column
    if GATHERS:
        tl.store(in_packed, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_packed, mask=inside), mask=inside)


@triton.jit
def _copy_between_kernel(
    source_ptr, theirs_ptr, target_ptr, ours_ptr, source_blocks, target_blocks, words, BLOCK: tl.constexpr
):
    number, part = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < words
    there, here = tl.load(theirs_ptr + number).to(tl.int64), tl.load(ours_ptr + number).to(tl.int64)
    found = tl.load(source_ptr + (part * source_blocks + there) * words + column, mask=inside)
    tl.store(target_ptr + (part * target_blocks + here) * words + column, found, mask=inside)
