"""Weights in 8-bit integers with a scale per output, to be multiplied with rows in 8-bit integers (W8A8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.quantized import num_bytes


@dataclass(frozen=True)
class Int8Weight:
    """values * scales[:, None]. Each row of activations is quantized too, by what its largest needs."""

    values: Tensor  # [out, in] int8
    scales: Tensor  # [out] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.values, self.scales)

    def dequantized(self) -> Tensor:
        return self.values.float() * self.scales[:, None]

    def joined(self, others: Sequence[Int8Weight]) -> Int8Weight:
        parts = [self, *others]
        return Int8Weight(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))

    def rows(self, ids: Tensor) -> Int8Weight:
        return Int8Weight(self.values[ids], self.scales[ids])
