"""Tokens of a sequence that are shared out among ranks, for kernels: which are kept here, and where. Integers alone: no
limit of its own.

With one rank all are kept, and nothing of this is compiled.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept_of(count, BLOCK_SIZE: tl.constexpr, PLACE: tl.constexpr, RANKS: tl.constexpr):
    """Tokens that are kept of a sequence's first `count`, which is not negative."""
    if RANKS > 1:
        newest = count % (BLOCK_SIZE * RANKS) - PLACE * BLOCK_SIZE
        count = count // (BLOCK_SIZE * RANKS) * BLOCK_SIZE + tl.minimum(tl.maximum(newest, 0), BLOCK_SIZE)
    return count


@triton.jit
def kept(count, SHAPE: tl.constexpr):
    return kept_of(count, SHAPE.block_size, SHAPE.place, SHAPE.ranks)


@triton.jit
def oldest_seen(positions, SHAPE: tl.constexpr):
    """The first position that a token sees where there is a window."""
    if SHAPE.in_chunks:
        oldest = positions // SHAPE.window * SHAPE.window
    else:
        oldest = tl.maximum(positions + 1 - SHAPE.window, 0)
    return oldest


@triton.jit
def keeps(positions, SHAPE: tl.constexpr):
    return positions // SHAPE.block_size % SHAPE.ranks == SHAPE.place
