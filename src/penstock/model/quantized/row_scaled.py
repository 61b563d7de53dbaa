"""Base of weights with a scale per output, whatever their values are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.quantized import num_bytes


@dataclass(frozen=True)
class RowScaled:
    """values * scales[:, None]"""

    values: Tensor  # [out, in]
    scales: Tensor  # [out] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.values, self.scales)

    def dequantized(self) -> Tensor:
        return self.values.float() * self.scales[:, None]
