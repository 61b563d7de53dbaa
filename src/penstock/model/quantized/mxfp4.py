"""Weights in MXFP4: numbers of 4 bits (e2m1), with a power of two for every 32 columns. gpt-oss has its experts so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.hub.stored import E2M1, MXFP4_GROUP
from penstock.model.quantized import num_bytes
from penstock.model.quantized.grouped import unpacked

GROUP = MXFP4_GROUP
BIAS = 127  # what exponents count from
BITS = 4.25  # of a weight, with its share of a scale


@dataclass(frozen=True)
class Mxfp4Weight:
    values: Tensor  # [out, in / 2] uint8, the first of two in the lower half
    scales: Tensor  # [out, in / 32] uint8: exponents (e8m0)

    @property
    def shape(self) -> torch.Size:
        out, stored = self.values.shape
        return torch.Size((out, stored * 2))

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.values, self.scales)

    def codes(self) -> Tensor:
        """[out, in] uint8: the bits of each number, one to a byte."""
        return unpacked(self.values)

    def dequantized(self) -> Tensor:
        table = torch.from_numpy(E2M1).to(self.values.device)
        wide = table[self.codes().long()].view(*self.scales.shape, GROUP)
        return torch.ldexp(wide, self.scales.int()[:, :, None] - BIAS).view(self.shape)

    def joined(self, others: Sequence[Mxfp4Weight]) -> Mxfp4Weight:
        parts = [self, *others]
        return Mxfp4Weight(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))

    def rows(self, ids: Tensor) -> Mxfp4Weight:
        return Mxfp4Weight(self.values[ids], self.scales[ids])
