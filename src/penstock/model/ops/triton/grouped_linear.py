"""A weight of 4- or 8-bit integers in groups, on a GPU: which kernel multiplies how many rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Norm
from penstock.model.ops.triton import grouped, grouped_lanes
from penstock.model.ops.triton.grouped import MAX_ROWS, Tiling
from penstock.model.ops.triton.grouped_many import ManyTiling, can_be_many, many_rows, widened
from penstock.model.ops.triton.launch import assembles
from penstock.model.ops.triton.thin import Ending
from penstock.model.ops.triton.words import Words, to_words
from penstock.model.quantized.grouped import GroupedWeight

_TILED = 32  # outputs of a program; with SwiGLU half of them are gates
MAX_SLICED = 256  # rows times bits; by the bytes that are read. Not measured yet: `tools.gpu_ops blocks`
MAX_MANY = 512  # rows; beyond, the weight is widened once. Not tuned: see docs/benchmarks.md


@dataclass(frozen=True)
class GroupedLinear:
    weight: Words
    order: Tensor | None  # of the columns, if they are not stored as they come

    @classmethod
    def of(cls, weight: GroupedWeight, bias: Tensor | None) -> GroupedLinear:
        return cls(to_words(weight, bias), weight.order)

    @property
    def has_bias(self) -> bool:
        return self.weight.bias is not None

    def takes(self, num_rows: int, ending: Ending = Ending.NOTHING) -> bool:
        halves_fit = ending is not Ending.SWIGLU or self.weight.outputs % _TILED == 0
        return num_rows <= MAX_ROWS and halves_fit

    def norms(self, num_rows: int) -> bool:
        return False

    def few(self, x: Tensor, *, norm: Norm | None = None, ending: Ending, into: Tensor | None = None) -> Tensor:
        assert norm is None
        outputs = self.weight.outputs // (2 if ending is Ending.SWIGLU else 1)
        out = x.new_empty(x.shape[0], outputs) if into is None else into
        self._multiply_few(self._ordered(x), ending, out)
        return out

    def _multiply_few(self, x: Tensor, ending: Ending, out: Tensor) -> None:
        if assembles():
            grouped_lanes.few_rows(x, self.weight, ending, out, grouped_lanes.lane_tiling(self.weight, ending))
        else:
            grouped.few_rows(x, self.weight, ending, out, _tiling(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self.takes(num_rows):
            return self.few(x, ending=Ending.NOTHING)
        if num_rows <= MAX_SLICED // self.weight.bits and not can_be_many(self.weight):
            return self._in_slices(x)
        x = self._ordered(x)
        if num_rows <= MAX_MANY and can_be_many(self.weight):
            return many_rows(x, self.weight, _many_tiling(num_rows, self.weight))
        return F.linear(x, widened(self.weight, x.dtype), self.weight.bias)

    def _in_slices(self, x: Tensor) -> Tensor:
        """A few rows at a time: to read short groups twice or thrice is less than to widen them and read that."""
        out = x.new_empty(x.shape[0], self.weight.outputs)
        for part, into in zip(torch.split(x, MAX_ROWS), torch.split(out, MAX_ROWS), strict=True):
            self.few(part, ending=Ending.NOTHING, into=into)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Of an embedding: the outputs of these numbers."""
        assert self.order is None
        return widened(self.weight, dtype, ids)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)


def _tiling(weight: Words) -> Tiling:
    """All of a program's chunks are one straight run of instructions: not more than eight turns."""
    chunks = weight.values.shape[1]
    warps = next(warps for warps in (4, 8, 16, 32) if chunks <= 8 * 2 * warps or warps == 32)
    return Tiling(_TILED, warps, 2 * warps)


def _many_tiling(num_rows: int, weight: Words) -> ManyTiling:
    if num_rows <= 32:
        return ManyTiling(32, 64, 4, 3)
    return ManyTiling(64, 64, 4, 3) if num_rows <= 64 else ManyTiling(128, 64, 4, 3)
