"""Weights in 4- and 8-bit integers, rounded to the nearest: what `--quant int4`, `int8` and `w8a8` do at load time.

Fast and good enough for 8 bits. A method that looks at activations loses less at 4 bits: see `penstock quantize`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.model.quantized.grouped import Bits, GroupedWeight, packed
from penstock.model.quantized.int8 import Int8Weight

GROUP = 128  # columns with one scale
_ROWS = 8192  # at a time: widened, they are a few times the weight


def grouped(weight: Tensor, bits: Bits, group: int = GROUP) -> GroupedWeight:
    """A [out, in] weight of any float type, on its own device. Symmetric: the largest of a group is one of the ends."""
    group = _fitting(weight.shape[1], group)
    parts = [_grouped_rows(rows, bits, group) for rows in torch.split(weight, _ROWS)]
    values, scales = zip(*parts, strict=True)
    return GroupedWeight(torch.cat(values), bits, torch.cat(scales))


def by_row(weight: Tensor) -> Int8Weight:
    """A scale for each output, so that rows of activations can be integers too."""
    parts = [_by_row(rows) for rows in torch.split(weight, _ROWS)]
    values, scales = zip(*parts, strict=True)
    return Int8Weight(torch.cat(values), torch.cat(scales))


def _fitting(columns: int, group: int) -> int:
    """The largest group that divides the columns: SmolLM2's 576 are 9 of 64."""
    while columns % group:
        group //= 2
    return group


def _grouped_rows(weight: Tensor, bits: Bits, group: int) -> tuple[Tensor, Tensor]:
    middle = 1 << (bits - 1)
    wide = weight.float().view(weight.shape[0], -1, group)
    # The end of the range that reaches further is for the number that is largest; the other end has one step less.
    low, high = wide.amin(dim=2), wide.amax(dim=2)
    largest = torch.where(-low > high, low, high)
    scales = (-largest / middle).to(torch.float16)
    scales = torch.where(scales == 0, torch.finfo(torch.float16).tiny, scales)
    values = (wide / scales.float()[:, :, None]).round().clamp(-middle, middle - 1) + middle
    integers = values.view(weight.shape).to(torch.uint8)
    return packed(integers) if bits == 4 else integers, scales


def _by_row(weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp(min=1e-12) / 127
    return (wide / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales
