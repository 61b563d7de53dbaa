"""Online softmax, in powers of two, for tiles of any number of rows: the state of a row, and how two states are joined.
A part of the attention kernels, which have the figures; partial results are bound by memory's bandwidth.

`acc` [rows, dim] is the weighted sum of values, `total` [rows] that of weights, `highest` [rows] the score that the
weights are relative to. Programs that take pieces of one context hand them to each other in memory.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops import AttentionSpec

LOG2_E = 1.4426950408889634


class Partials(NamedTuple):
    """Results of pieces, one of each head."""

    acc: Tensor  # [pieces, heads, dim] float32
    total: Tensor  # [pieces, heads] float32
    highest: Tensor  # [pieces, heads] float32

    @classmethod
    def empty(cls, num_pieces: int, spec: AttentionSpec, device: torch.device) -> Partials:
        return cls.of_width(num_pieces, spec.num_heads, spec.head_dim, device)

    @classmethod
    def of_width(cls, num_pieces: int, num_heads: int, width: int, device: torch.device) -> Partials:
        shapes = (num_pieces, num_heads, width), (num_pieces, num_heads), (num_pieces, num_heads)
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


@triton.jit
def nothing_yet(ROWS: tl.constexpr, DIM: tl.constexpr):
    # Finite: a mask may hide all of a row's first keys, and infinity less infinity is NaN.
    highest = tl.full([ROWS], -1e30, tl.float32)
    return tl.zeros([ROWS, DIM], tl.float32), tl.zeros([ROWS], tl.float32), highest


@triton.jit
def sinks_alone(sinks_ptr, head, has_sink, DIM: tl.constexpr):
    """Rows that have met their head's sink and no key yet: a score that has its share of the weights, and no value. Of
    all that is joined for a row, one state has it (`has_sink` [rows]); the others have seen nothing."""
    acc, total, highest = nothing_yet(head.shape[0], DIM)
    sinks = tl.load(sinks_ptr + head, mask=has_sink, other=0.0) * 1.4426950408889634  # log2(e): exponents are base 2
    return acc, tl.where(has_sink, 1.0, total), tl.where(has_sink, sinks, highest)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """Scores in powers of two, kept within CAP, which is not: cap * tanh(score / cap)."""
    IN_TWOS: tl.constexpr = CAP * 1.4426950408889634
    # tanh x = 1 - 2 / (1 + e^2x). An infinite power is as right as any that is large.
    return IN_TWOS - 2.0 * IN_TWOS / (1.0 + tl.exp2(scores * (2.0 / CAP)))


@triton.jit
def joined(acc, total, highest, their_acc, their_total, their_highest):
    higher = tl.maximum(highest, their_highest)
    decay = tl.exp2(highest - higher)
    weight = tl.exp2(their_highest - higher)
    return acc * decay[:, None] + their_acc * weight[:, None], total * decay + their_total * weight, higher


@triton.jit
def outputs(acc, total, value_scale, MAY_SEE_NOTHING: tl.constexpr):
    share = value_scale / total
    if MAY_SEE_NOTHING:
        share = tl.where(total > 0.0, share, 0.0)
    return acc * share[:, None]


@triton.jit
def log_sum_exp(total, highest):
    """Natural; -inf of a row that has seen nothing."""
    seen = total > 0.0
    return tl.where(seen, (highest + tl.log2(tl.where(seen, total, 1.0))) * 0.6931471805599453, float("-inf"))


@triton.jit
def store_partial(partials, at, inside, acc, total, highest, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """`at` [rows] counts heads of pieces."""
    d = tl.arange(0, BLOCK_DIM)[None, :]
    tl.store(partials.acc + at[:, None] * DIM + d, acc, mask=inside[:, None] & (d < DIM))
    tl.store(partials.total + at, total, mask=inside)
    tl.store(partials.highest + at, highest, mask=inside)


@triton.jit
def load_partial(partials, at, inside, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Others may have written them in this launch: the L1 cache is passed by."""
    d = tl.arange(0, BLOCK_DIM)[None, :]
    mask = inside[:, None] & (d < DIM)
    acc = tl.load(partials.acc + at[:, None] * DIM + d, mask=mask, other=0.0, cache_modifier=".cg")
    total = tl.load(partials.total + at, mask=inside, other=0.0, cache_modifier=".cg")
    highest = tl.load(partials.highest + at, mask=inside, other=-1e30, cache_modifier=".cg")
    return acc, total, highest
