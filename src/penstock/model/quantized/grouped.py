"""Weights in 4- or 8-bit integers, with a scale for each group of columns: GPTQ, AWQ, compressed-tensors, GGUF's
blocks, and what `--quant int4` and `int8` make while a model is loaded. Activations are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.model.quantized import num_bytes, stacked

Bits = Literal[4, 8]


@dataclass(frozen=True)
class GroupedWeight:
    """(value - zero) * scale; or, where there are minimums, value * scale + minimum.

    Columns of one group lie together: all groups have the same size. If a quantizer ordered the columns by their
    importance (GPTQ's act-order) they are stored in that order, and the activations are put into it too.
    """

    values: Tensor  # uint8: [out, in], or [out, in / 2] for 4 bits, the first of two in the lower half
    bits: Bits
    scales: Tensor  # [out, groups], a float type
    zeros: Tensor | None = None  # [out, groups] uint8; None: the middle, 8 or 128
    minimums: Tensor | None = None  # [out, groups], a float type
    order: Tensor | None = None  # [in] int64: column i of `values` is column order[i] of the weight

    @property
    def shape(self) -> torch.Size:
        out, stored = self.values.shape
        return torch.Size((out, stored * 8 // self.bits))

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.values, self.scales, self.zeros, self.minimums, self.order)

    def integers(self) -> Tensor:
        """[out, in] uint8: the values, one per byte, in the stored order of columns."""
        return unpacked(self.values) if self.bits == 4 else self.values

    def offsets(self) -> Tensor | None:
        """[out, groups] float32: what a group adds if its values count from the middle; None: nothing."""
        middle, scales = 1 << (self.bits - 1), self.scales.float()
        if self.minimums is not None:
            return self.minimums.float() + middle * scales
        return None if self.zeros is None else (middle - self.zeros.float()) * scales

    def dequantized(self) -> Tensor:
        out, columns = self.shape
        wide = self.integers().float().view(out, -1, self.group_size)  # [out, groups, in group]
        scales = self.scales.float()[:, :, None]
        if self.minimums is not None:
            wide = wide * scales + self.minimums.float()[:, :, None]
        else:
            zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()[:, :, None]
            wide = (wide - zeros) * scales
        wide = wide.view(out, columns)
        if self.order is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.order, wide)

    def joined(self, others: Sequence[GroupedWeight]) -> GroupedWeight | None:
        """Parts that differ in bits or groups get as many bits as the largest and groups as small as the smallest."""
        parts = [self, *others]
        if not all(_same(part.order, self.order) for part in others):
            return None
        if len({part.bits for part in parts}) > 1:
            parts = [part._in_8_bits() for part in parts]
        size = math.gcd(*(part.group_size for part in parts))
        parts = [part._in_groups_of(size) for part in parts]
        if any(part.minimums is not None for part in parts):
            parts = [part._with_minimums() for part in parts]
        elif any(part.zeros is not None for part in parts):
            parts = [part._with_zeros() for part in parts]
        values = stacked([part.values for part in parts])
        scales = stacked([part.scales for part in parts])
        assert values is not None
        assert scales is not None
        zeros, minimums = stacked([part.zeros for part in parts]), stacked([part.minimums for part in parts])
        return GroupedWeight(values, parts[0].bits, scales, zeros, minimums, self.order)

    def rows(self, ids: Tensor) -> GroupedWeight:
        zeros = None if self.zeros is None else self.zeros[ids]
        minimums = None if self.minimums is None else self.minimums[ids]
        return replace(self, values=self.values[ids], scales=self.scales[ids], zeros=zeros, minimums=minimums)

    def _with_zeros(self) -> GroupedWeight:
        if self.zeros is not None:
            return self
        middle = torch.full_like(self.scales, 1 << (self.bits - 1), dtype=torch.uint8)
        return replace(self, zeros=middle)

    def _with_minimums(self) -> GroupedWeight:
        if self.minimums is not None:
            return self
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()
        return replace(self, zeros=None, minimums=-self.scales.float() * zeros)

    def _in_8_bits(self) -> GroupedWeight:
        if self.bits == 8:
            return self
        counts_from_middle = self.zeros is None and self.minimums is None
        return replace(self, bits=8, values=self.integers() + (120 if counts_from_middle else 0))

    def _in_groups_of(self, size: int) -> GroupedWeight:
        times = self.group_size // size
        if times == 1:
            return self
        scales, zeros, minimums = (
            None if each is None else each.repeat_interleave(times, dim=1)
            for each in (self.scales, self.zeros, self.minimums)
        )
        assert scales is not None
        return replace(self, scales=scales, zeros=zeros, minimums=minimums)


def unpacked(pairs: Tensor) -> Tensor:
    """[out, in / 2] -> [out, in]: two values of 4 bits from every byte."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)


def packed(integers: Tensor) -> Tensor:
    """[out, in] uint8, all under 16 -> [out, in / 2]"""
    return integers[:, ::2] | (integers[:, 1::2] << 4)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
