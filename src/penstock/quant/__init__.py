"""Quantization of a checkpoint's weights to those that a device reads faster.

This module does it while they are loaded: formats, no models. `penstock quantize` is in `job`, over `walk` and
`layerwise`, which put data through a model's layers, and `gptq` and `awq`, which see a weight and what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import Tensor

from penstock.model.quantized import Weight, plain
from penstock.model.quantized.fp8 import Fp8Weight
from penstock.model.quantized.grouped import GroupedWeight
from penstock.model.quantized.int8 import Int8Weight
from penstock.model.quantized.mxfp4 import Mxfp4Weight
from penstock.quant import e4m3, integers, mxfp4

Quant = Literal["none", "fp8", "int8", "int4", "w8a8", "mxfp4"]

_QUANTIZERS: dict[Quant, Callable[[Tensor], Weight]] = {
    "none": lambda weight: weight,
    "fp8": e4m3.quantized,
    "int8": partial(integers.grouped, bits=8),
    "int4": partial(integers.grouped, bits=4),
    "w8a8": integers.by_row,
    "mxfp4": mxfp4.quantized,
}


def quant_of(weight: Weight) -> Quant:
    if isinstance(weight, GroupedWeight):
        return "int4" if weight.bits == 4 else "int8"
    if isinstance(weight, Mxfp4Weight):
        return "mxfp4"
    return "fp8" if isinstance(weight, Fp8Weight) else "w8a8" if isinstance(weight, Int8Weight) else "none"


def to_quant(quant: Quant, weight: Weight) -> Weight:
    """The weight in this format; if it has it already, as it is."""
    return weight if quant_of(weight) == quant else _QUANTIZERS[quant](plain(weight))


def as_stored(weight: Weight) -> Weight:
    return weight
