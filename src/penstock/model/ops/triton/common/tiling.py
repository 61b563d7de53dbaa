"""How a kernel is cut into programs: one record for every kernel whose launch is tuned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Share of one program. A size that a kernel does not cut by is 0."""

    block_m: int = 0  # rows of activations; in attention queries times heads
    block_n: int = 0  # outputs; in attention keys, and a block of the cache is a multiple of it
    block_k: int = 0  # columns that are multiplied at a time
    split_k: int = 1  # partial sums along the columns within a program; warps share them
    num_warps: int = 4
    num_stages: int = 1  # turns whose weights or keys are read ahead
