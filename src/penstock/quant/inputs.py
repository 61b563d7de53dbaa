"""Statistics of a linear layer's inputs: all that GPTQ and AWQ know of the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Inputs:
    """Sums over rows of activations, of which none is kept."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self._products = torch.zeros(columns, columns, device=device)
        self._magnitudes = torch.zeros(columns, device=device)
        self.num_rows = 0

    def add(self, rows: Tensor) -> None:
        """[rows, columns]"""
        wide = rows.float()
        self._products.addmm_(wide.T, wide)
        self._magnitudes += wide.abs().sum(dim=0)
        self.num_rows += rows.shape[0]

    @property
    def products(self) -> Tensor:
        """[columns, columns]: the mean of x xᵀ. An error E of a weight costs the output trace(E products Eᵀ)."""
        return self._products / self.num_rows

    @property
    def magnitudes(self) -> Tensor:
        """[columns]: the mean of |x|"""
        return self._magnitudes / self.num_rows


def mean_magnitudes(several: Sequence[Inputs]) -> Tensor:
    """Mean magnitudes over all their rows."""
    total = sum(one.num_rows for one in several)
    return torch.stack([one.magnitudes * (one.num_rows / total) for one in several]).sum(dim=0)
