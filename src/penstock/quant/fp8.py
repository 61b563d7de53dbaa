"""Linear weights quantized to FP8 while a model is loaded: half the bytes, and twice the speed of a product.

Embeddings and the head stay as they are. Checkpoints that are FP8 already are used as stored.
"""

from __future__ import annotations

from torch import Tensor

from penstock.model.ops import Fp8Weight, Linear
from penstock.model.ops.triton import TritonOps
from penstock.quant.e4m3 import quantized


class Fp8Ops(TritonOps):
    """The GPU's operations, with every linear in FP8."""

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        return super().linear(weight if isinstance(weight, Fp8Weight) else quantized(weight.to(self.device)), bias)
