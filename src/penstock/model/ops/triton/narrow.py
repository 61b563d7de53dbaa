"""Integers in groups, with as little beside them as a GPU needs: what is read with every weight takes time too."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.model.quantized.grouped import GroupedWeight, packed


def narrowed(weight: GroupedWeight) -> GroupedWeight:
    """Nearly the same numbers, a few thousandths of a step away.

    Scales that are products of a block's and a group's (GGUF's blocks of 256) become half precision. What a group adds
    is to be small, for it will be half precision too: of integers that count from elsewhere than the middle of their
    bits, as those of 2 bits and of 5 do, each output's are moved there.
    """
    scales = weight.scales.half() if weight.scales.dtype is torch.float32 else weight.scales
    if not scales.isfinite().all():
        return weight
    if weight.minimums is None:
        return replace(weight, scales=scales)
    integers = weight.integers()
    low, high = (found.int() for found in integers.aminmax(dim=1, keepdim=True))
    shift = (1 << (weight.bits - 1)) - (low + high + 1) // 2  # [out, 1]
    moved = integers + (shift % 256).to(torch.uint8)  # bytes count round
    minimums = weight.minimums.float() - shift * scales.float()
    return replace(weight, values=packed(moved) if weight.bits == 4 else moved, scales=scales, minimums=minimums)
