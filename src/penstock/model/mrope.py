"""Rotary embeddings in three directions (M-RoPE): a token of an image turns with its time, its row and its column.

Each of a head's frequencies follows one of them. A token of text has the same number three times: the place after all
that an image before it takes up. Queries and keys are rotated here, in float32, before the kernels of attention, which
are given angles of zero: no kernel needs to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.core.model_config import ModelConfig
from penstock.model.batch import Angles, Batch
from penstock.model.ops import AttentionSpec
from penstock.model.rope import inverse_frequencies


@dataclass(frozen=True, slots=True)
class Mrope:
    frequencies: Tensor  # [head_dim / 2] float32
    directions: Tensor  # [head_dim / 2] int64: what each turns with

    @classmethod
    def of(cls, config: ModelConfig, device: torch.device) -> Mrope | None:
        sections = config.rope_sections
        if not sections:
            return None
        if sum(sections) != config.head_dim // 2:
            raise ModelCorrupt(f"its mrope_section {list(sections)} is not of a head of {config.head_dim} dimensions")
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        return cls(frequencies.to(device), _directions(sections, interleaved=config.rope_interleaved).to(device))

    def __call__(self, batch: Batch) -> Angles:
        rows = batch.mrope_positions
        places = batch.positions.float()[:, None] if rows is None else rows.float()[self.directions].T
        angles = (places * self.frequencies)[:, None]
        return Angles(angles.cos(), angles.sin())


def apply_mrope(qkv: Tensor, spec: AttentionSpec, batch: Batch) -> Tensor:
    """Queries and keys normed, if they are to be, and rotated, in place; values as they are."""
    assert batch.angles is not None, "a decoder whose layers turn makes the angles"
    cos, sin = batch.angles.cos, batch.angles.sin
    heads = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.num_heads + spec.num_kv_heads]
    first, second = _normed(heads.float(), spec).chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return qkv


def _normed(heads: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.q_norm is None or spec.k_norm is None:
        return heads
    weights = spec.q_norm.expand(spec.num_heads, -1), spec.k_norm.expand(spec.num_kv_heads, -1)
    return heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + spec.norm_eps) * torch.cat(weights).float()


def _directions(sections: Sequence[int], *, interleaved: bool) -> Tensor:
    """Direction that each frequency turns with: 0 time, 1 row, 2 column."""
    if not interleaved:
        return torch.arange(len(sections)).remainder(3).repeat_interleave(torch.tensor(sections))
    directions = torch.zeros(sum(sections), dtype=torch.int64)
    for direction in (1, 2):
        directions[direction : 3 * sections[direction] : 3] = direction
    return directions
