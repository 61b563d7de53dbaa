"""Heads as attention reads them: QK norm and rotary embedding while they are loaded, rounding to the type of the cache.
For heads of any even size, any number of rows. A part of the attention kernels, which have the figures: loading is the
limit.

A cache tensor is [num_blocks, kv_heads, block_size, head_dim]: what one program reads of a block lies in one piece.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.model.ops import AttentionSpec, LayerKV, Rope

# A step's integers are views of one buffer, at any offset and of any number: no kernel is compiled anew for them.
BATCH_POINTERS = ["query_starts_ptr", "context_lens_ptr", "block_tables_ptr"]
BATCH_NUMBERS = ["table_stride", "num_sequences"]


@dataclass(frozen=True)
class Shape:
    """Constants that every attention kernel of a layer is compiled for."""

    num_heads: int
    num_kv_heads: int
    dim: int
    block_dim: int  # of a tile: a power of two, and 16 are the least that a matrix product takes
    block_size: int
    window: int  # 0: none
    in_chunks: bool  # contexts are cut into chunks of `window` tokens
    has_norm: bool
    cap: float  # of scores; 0: none
    precision: str  # of products
    place: int = 0  # of every `ranks` blocks of a sequence, the one that is kept here
    ranks: int = 1
    has_sinks: bool = False  # here: of ranks that share out tokens, the first counts them

    @classmethod
    def of(cls, spec: AttentionSpec, kv: LayerKV, dtype: torch.dtype) -> Shape:
        return cls(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            block_dim=max(triton.next_power_of_2(spec.head_dim), 16),
            block_size=kv.block_size,
            window=spec.window or 0,
            in_chunks=spec.in_chunks,
            has_norm=spec.q_norm is not None,
            cap=spec.cap or 0.0,
            precision="ieee" if dtype is torch.float32 else "tf32",
            place=kv.tokens.place,
            ranks=kv.tokens.size,
            has_sinks=spec.sinks is not None and kv.tokens.place == 0,
        )

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def table_block_size(self) -> int:
        """Tokens of a sequence for which its block table has one entry."""
        return self.block_size * self.ranks

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.dim


class Rotation(NamedTuple):
    """Norm and rotation of heads as they are loaded."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float

    @classmethod
    def of(cls, spec: AttentionSpec, rope: Rope) -> Rotation:
        return cls(rope.cos, rope.sin, spec.q_norm, spec.k_norm, spec.norm_eps)


@triton.jit
def load_rotated(heads, positions, inside, rotation, norms, SHAPE: tl.constexpr):
    """Heads [rows, block_dim] from pointers to their first elements [rows], in the type they are stored in.

    `norms` is a norm's weights, or such pointers [rows, 1] if rows have different ones.
    """
    D: tl.constexpr = SHAPE.dim
    HALF: tl.constexpr = D // 2
    d = tl.arange(0, SHAPE.block_dim)
    is_first = d < HALF
    angle = tl.where(is_first, d, d - HALF)
    partner = tl.where(is_first, d + HALF, d - HALF)
    mask = inside[:, None] & (d < D)[None, :]
    dtype = heads.dtype.element_ty
    x = tl.load(heads[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if SHAPE.has_norm:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + rotation.eps)[:, None]
        x_weight = tl.load(norms + d[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        y_weight = tl.load(norms + partner[None, :], mask=(d < D)[None, :], other=0.0).to(tl.float32)
        # Rounded where the reference rounds.
        x = (x_weight * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (y_weight * (y * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    at = positions[:, None] * HALF + angle[None, :]
    cos = tl.load(rotation.cos + at, mask=mask, other=0.0)
    sin = tl.load(rotation.sin + at, mask=mask, other=0.0)
    return (x * cos + y * tl.where(is_first[None, :], -sin, sin)).to(dtype)


@triton.jit
def as_stored(x, scale, dtype: tl.constexpr):
    """Keys or values as the cache keeps them. What is wider than 8 bits is kept as it is."""
    MOST: tl.constexpr = 448.0  # that e4m3 can hold
    if dtype.is_fp8():
        x = tl.clamp(x.to(tl.float32) / scale, -MOST, MOST)
    return x.to(dtype)
