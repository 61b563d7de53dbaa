"""Weights in 8-bit integers with a scale per output, to be multiplied with rows in 8-bit integers (W8A8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.quantized.row_scaled import RowScaled


@dataclass(frozen=True)
class Int8Weight(RowScaled):
    """Values are int8. Each row of activations is quantized too, by what its largest needs."""

    def joined(self, others: Sequence[Int8Weight]) -> Int8Weight:
        parts = [self, *others]
        return Int8Weight(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))

    def rows(self, ids: Tensor) -> Int8Weight:
        return Int8Weight(self.values[ids], self.scales[ids])
