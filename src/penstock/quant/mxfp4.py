"""Weights in MXFP4, rounded to the nearest: for random weights of a model that comes so (`--load dummy`)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.hub.stored import E2M1
from penstock.model.quantized.grouped import packed
from penstock.model.quantized.mxfp4 import BIAS, GROUP, Mxfp4Weight

_LARGEST_EXPONENT = 2  # of e2m1, whose largest is 6


def quantized(weight: Tensor) -> Mxfp4Weight:
    """A [out, in] weight of any float type, `in` a multiple of 32. The largest of a group is clipped to 6 times its
    power of two, as the format's standard has it."""
    wide = weight.float().view(weight.shape[0], -1, GROUP)
    largest = wide.abs().amax(dim=2)
    exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    exponents = torch.where(largest > 0, exponents, 0).clamp(-BIAS + 1, BIAS)
    magnitudes = torch.ldexp(wide.abs(), -exponents[:, :, None])
    table = torch.from_numpy(E2M1[:8]).to(weight.device)
    steps = torch.bucketize(magnitudes, (table[1:] + table[:-1]) / 2)  # nearest of the eight
    codes = (steps + 8 * (wide < 0)).to(torch.uint8).view(weight.shape)
    return Mxfp4Weight(packed(codes), (exponents + BIAS).to(torch.uint8))
