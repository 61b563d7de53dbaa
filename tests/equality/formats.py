"""Every format that weights are kept in, made of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from penstock.model.quantized import Weight, joined, plain
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.weights import Quantize
from penstock.quant import e4m3, integers, mxfp4
from tests.model.ops.low_bit import grouped, per_channel

Kept = Callable[[Tensor], Weight]


def in_order(weight: Tensor) -> GroupedWeight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device)
    kept = grouped(weight[:, order], 4, 32, has_zeros=True)
    return GroupedWeight(kept.values, kept.bits, kept.scales, kept.zeros, order=order)


FORMATS: dict[str, Kept] = {
    "plain": lambda weight: weight,
    "Q4_0": lambda weight: grouped(weight, 4, 32),
    "Q4_1, Q4_K": lambda weight: grouped(weight, 4, 32, has_minimums=True),
    "Q2_K": lambda weight: grouped(weight, 4, 16, has_minimums=True),
    "Q3_K": lambda weight: grouped(weight, 4, 16),
    "Q6_K": lambda weight: grouped(weight, 8, 16),
    "Q8_0": lambda weight: grouped(weight, 8, 32),
    "Q5_1, Q5_K": lambda weight: grouped(weight, 8, 32, has_minimums=True),
    "Q4_K and Q6_K joined": lambda weight: joined(
        [grouped(weight[:-16], 4, 32, has_minimums=True), grouped(weight[-16:], 8, 16)]
    ),
    "GPTQ, AWQ": lambda weight: grouped(weight, 4, 64, has_zeros=True),
    "GPTQ with act-order": in_order,
    "int4": lambda weight: integers.grouped(weight, 4),
    "int8": lambda weight: integers.grouped(weight, 8),
    "w8a8": per_channel,
    "fp8": e4m3.quantized,
    "MXFP4": mxfp4.quantized,
}


def in_turn(formats: dict[str, Kept] = FORMATS) -> Quantize:
    """Each linear in the next format; the same one in the same, whichever thread loads it and for whichever model."""
    kinds = cycle(formats.values())
    chosen: dict[bytes, Kept] = {}

    def quantize(weight: Weight) -> Weight:
        wide = plain(weight)
        return chosen.setdefault(wide[0, :4].cpu().numpy().tobytes(), next(kinds))(wide)

    return quantize
