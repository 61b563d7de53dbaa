"""Weights in FP8's e4m3, with a scale per output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.model.quantized.row_scaled import RowScaled


@dataclass(frozen=True)
class Fp8Weight(RowScaled):
    """Values are float8_e4m3fn."""

    input_scale: float | None = None  # activations are divided by it; None: each row by what its largest needs

    def joined(self, others: Sequence[Fp8Weight]) -> Fp8Weight:
        """The parts read the same activations, and those are quantized once: with the largest of the scales that the
        parts were calibrated to, nothing is clipped that was not before. One part without a scale makes all dynamic."""
        parts = [self, *others]
        input_scales = [part.input_scale for part in parts if part.input_scale is not None]
        return Fp8Weight(
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            max(input_scales) if len(input_scales) == len(parts) else None,
        )

    def rows(self, ids: Tensor) -> Fp8Weight:
        # Not every torch indexes FP8.
        values = self.values.view(torch.uint8)[ids].view(self.values.dtype)
        return replace(self, values=values, scales=self.scales[ids])
