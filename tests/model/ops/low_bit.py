"""Weights rounded to a few bits in the plainest way, for tests."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.model.quantized.grouped import GroupedWeight, packed
from penstock.model.quantized.int8 import Int8Weight


def grouped(
    weight: Tensor, bits: Literal[4, 8], size: int, *, has_minimums: bool = False, has_zeros: bool = False
) -> GroupedWeight:
    """Returns groups of `size`, with scales in half precision; without minimums or zeros, around the middle."""
    largest, (out, columns) = (1 << bits) - 1, weight.shape
    groups = weight.view(out, -1, size)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    if not has_minimums and not has_zeros:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    scales = ((high - low) / largest).clamp(min=1e-6).half().float()
    minimums = low.half().float()
    zeros = (-low / scales).round().clamp(0, largest)
    middle = float(1 << (bits - 1))
    offset = -minimums / scales if has_minimums else zeros if has_zeros else middle
    integers = (groups / scales + offset).round().clamp(0, largest).to(torch.uint8).view(out, columns)
    return GroupedWeight(
        packed(integers) if bits == 4 else integers,
        bits,
        scales.squeeze(2).half(),
        zeros.squeeze(2).to(torch.uint8) if has_zeros else None,
        minimums.squeeze(2).half() if has_minimums else None,
    )


def per_channel(weight: Tensor) -> Int8Weight:
    scales = weight.abs().amax(1) / 127
    return Int8Weight((weight / scales[:, None]).round().to(torch.int8), scales)
