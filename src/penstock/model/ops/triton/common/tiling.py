"""How a kernel is cut into programs: one record for every kernel whose launch is tuned, and the order of programs in a
GEMM of many rows. The kernels have the shapes and the figures.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

_TOGETHER = tl.constexpr(8)  # blocks of rows whose programs run side by side


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Share of one program. A size that a kernel does not cut by is 0."""

    block_m: int = 0  # rows of activations; in attention queries times heads
    block_n: int = 0  # outputs; in attention keys, and a block of the cache is a multiple of it
    block_k: int = 0  # columns that are multiplied at a time
    split_k: int = 1  # partial sums along the columns within a program; warps share them
    num_warps: int = 4
    num_stages: int = 1  # turns whose weights or keys are read ahead


@triton.jit
def side_by_side(program, blocks, parts):
    """A program's block of rows and part of the outputs: those of a few blocks run together, over all their parts, so
    that rows and weights stay in the L2 cache."""
    per_run = _TOGETHER * parts
    run = program // per_run
    width = tl.minimum(blocks - run * _TOGETHER, _TOGETHER)
    within = program % per_run
    return run * _TOGETHER + within % width, within // width
