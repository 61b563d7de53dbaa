"""FP8 (e4m3) weights, quantized while a model is loaded: half the bytes, and twice the speed of a product.

Each output has a scale of its own, so an outlier costs only its neighbours' precision. Embeddings and the head stay as
they are. Checkpoints that are FP8 already are used as stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.model.ops import Fp8Weight, Linear
from penstock.model.ops.triton import TritonOps

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ROWS = 8192  # at a time: widened, they are a few times the weight


class Fp8Ops(TritonOps):
    """The GPU's operations, with every linear in FP8."""

    def linear(self, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Linear:
        return super().linear(weight if isinstance(weight, Fp8Weight) else quantized(weight.to(self.device)), bias)


def quantized(weight: Tensor) -> Fp8Weight:
    """A [out, in] weight of any float type, on its own device. The largest of a row becomes the largest FP8 has."""
    parts = [_quantized_rows(weight[start : start + _ROWS]) for start in range(0, weight.shape[0], _ROWS)]
    values, scales = zip(*parts, strict=True)
    return Fp8Weight(torch.cat(values), torch.cat(scales))


def _quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST
    return (wide / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales
