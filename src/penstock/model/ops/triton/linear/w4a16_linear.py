"""Linears of 4- and 8-bit integers in groups (W4A16, W8A16): which kernel multiplies how many rows. Up to 16 rows
reading weights is the limit (51 % of the bandwidth with one row: `w4a16_gemv`), from some hundreds on arithmetic; what
lies between was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Norm
from penstock.model.ops.triton.common.device import has_ptx
from penstock.model.ops.triton.common.tiling import Tiling
from penstock.model.ops.triton.linear import q6k, w4a16_gemv
from penstock.model.ops.triton.linear.gemv import Epilogue
from penstock.model.ops.triton.linear.int4_pack import COLUMNS, PackedWeight, can_pack, pack
from penstock.model.ops.triton.linear.w4a16_gemm import dequantized, many_rows
from penstock.model.quantized.grouped import GroupedWeight

MAX_ROWS = 16  # of a GEMV
_TILED = 32  # outputs of a program; with SwiGLU half of them are gates
MAX_SLICED = 256  # rows times bits; by the bytes that are read. Not measured yet: `tools.gpu_ops blocks`
MAX_MANY = 512  # rows; beyond, the weight is widened once. Not tuned: see docs/benchmarks.md


@dataclass(frozen=True)
class W4A16Linear:
    weight: PackedWeight
    order: Tensor | None  # of the columns, if they are not stored as they come

    @staticmethod
    def supports(weight: GroupedWeight) -> bool:
        return can_pack(weight) or (weight.group_size == q6k.GROUP and weight.shape[1] % COLUMNS == 0)

    @classmethod
    def of(cls, weight: GroupedWeight, bias: Tensor | None) -> W4A16Linear:
        return cls(pack(weight, bias), weight.order)

    @property
    def has_bias(self) -> bool:
        return self.weight.bias is not None

    def can_gemv(self, num_rows: int, epilogue: Epilogue = Epilogue.NONE) -> bool:
        halves_fit = epilogue is not Epilogue.SWIGLU or self.weight.outputs % _TILED == 0
        return num_rows <= MAX_ROWS and halves_fit

    def can_fuse_norm(self, num_rows: int) -> bool:
        return False

    def gemv(self, x: Tensor, *, norm: Norm | None = None, epilogue: Epilogue, into: Tensor | None = None) -> Tensor:
        assert norm is None
        outputs = self.weight.outputs // (2 if epilogue is Epilogue.SWIGLU else 1)
        out = x.new_empty(x.shape[0], outputs) if into is None else into
        self._gemv(self._ordered(x), epilogue, out)
        return out

    def _gemv(self, x: Tensor, epilogue: Epilogue, out: Tensor) -> None:
        if has_ptx() and self.weight.group_size > q6k.GROUP:
            w4a16_gemv.few_rows(x, self.weight, epilogue, out, w4a16_gemv.tiling_of(self.weight, epilogue))
        else:
            q6k.few_rows(x, self.weight, epilogue, out, q6k.TILING)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        if self.can_gemv(num_rows):
            return self.gemv(x, epilogue=Epilogue.NONE)
        if num_rows <= MAX_SLICED // self.weight.bits and not self.weight.fits_gemm:
            return self._in_slices(x)
        x = self._ordered(x)
        if num_rows <= MAX_MANY and self.weight.fits_gemm:
            return many_rows(x, self.weight, _many_tiling(num_rows))
        return F.linear(x, dequantized(self.weight, x.dtype), self.weight.bias)

    def _in_slices(self, x: Tensor) -> Tensor:
        """A few rows at a time: to read short groups twice or thrice is less than to widen them and read that."""
        out = x.new_empty(x.shape[0], self.weight.outputs)
        for part, into in zip(torch.split(x, MAX_ROWS), torch.split(out, MAX_ROWS), strict=True):
            self.gemv(part, epilogue=Epilogue.NONE, into=into)
        return out

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of an embedding: the outputs of these numbers."""
        assert self.order is None
        return dequantized(self.weight, dtype, ids)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)


def _many_tiling(num_rows: int) -> Tiling:
    rows = next((rows for rows in (32, 64) if num_rows <= rows), 128)
    return Tiling(block_m=rows, block_n=64, num_warps=4, num_stages=3)
