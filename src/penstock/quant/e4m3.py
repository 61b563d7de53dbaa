"""Weights in FP8's e4m3: four bits of exponent, three of mantissa. Each output has a scale of its own, so an outlier
costs only its neighbours' precision."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.model.quantized.fp8 import Fp8Weight

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_ROWS = 8192  # at a time: widened, they are a few times the weight


def quantized(weight: Tensor) -> Fp8Weight:
    """A [out, in] weight of any float type, on its own device. The largest of a row becomes the largest FP8 has."""
    parts = [_quantized_rows(weight[start : start + _ROWS]) for start in range(0, weight.shape[0], _ROWS)]
    values, scales = zip(*parts, strict=True)
    return Fp8Weight(torch.cat(values), torch.cat(scales))


def _quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp(min=1e-12) / _LARGEST
    return (wide / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales
