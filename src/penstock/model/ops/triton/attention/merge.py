"""Merge, by log-sum-exp, of what ranks that share out tokens have found for one rank's heads: any number of ranks, rows
and heads. With few rows the start of a kernel is the limit, with many memory's bandwidth; it was not measured.

A program takes one head of one row, and goes through the ranks in their order: all runs give the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def merge_parts(parts: Tensor, num_heads: int) -> Tensor:
    """The kernel of `model.sequence.merged`: [tokens, heads * dim] of [ranks, tokens, width]."""
    parts = parts.contiguous()
    num_ranks, num_tokens, width = parts.shape
    own = width - num_heads * torch.float32.itemsize // parts.itemsize
    out = parts.new_empty(num_tokens, own)
    dim = own // num_heads
    _merge_kernel[(num_tokens, num_heads)](
        parts,
        parts.view(torch.float32),
        out,
        num_tokens,
        RANKS=num_ranks,
        HEADS=num_heads,
        WIDTH=width,
        FLOATS=width * parts.itemsize // torch.float32.itemsize,
        DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim),
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _merge_kernel(
    parts_ptr,
    floats_ptr,
    out_ptr,
    num_tokens,
    RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    FLOATS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Log-sum-exps are the last HEADS of a row's FLOATS; outputs the first numbers of its WIDTH."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_DIM)
    highest = -1e30  # finite: padding sees nothing anywhere
    for rank in tl.static_range(RANKS):
        row = rank * num_tokens + token
        highest = tl.maximum(highest, tl.load(floats_ptr + row * FLOATS + FLOATS - HEADS + head))
    found = tl.zeros([BLOCK_DIM], tl.float32)
    total = 0.0
    for rank in tl.static_range(RANKS):
        row = rank * num_tokens + token
        weight = tl.exp(tl.load(floats_ptr + row * FLOATS + FLOATS - HEADS + head) - highest)
        part = tl.load(parts_ptr + row * WIDTH + head * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
        found += part * weight
        total += weight
    found = found * tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out_ptr + (token * HEADS + head) * DIM + d, found, mask=d < DIM)
