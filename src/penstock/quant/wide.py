"""FP8 checkpoints widened while they are loaded: twice the bytes, and the precision of 16-bit products."""

from __future__ import annotations

from torch import Tensor

from penstock.model.ops import Fp8Weight, Linear, plain
from penstock.model.ops.triton import TritonOps


class WideOps(TritonOps):
    """The GPU's operations, with no linear in FP8."""

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        return super().linear(plain(weight), bias)
