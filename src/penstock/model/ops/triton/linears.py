"""Weights on a GPU, and what multiplies with them: our kernel for a few rows, cuBLAS for many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Scaled
from penstock.model.ops.triton import thin
from penstock.model.ops.triton.rowwise import Fp8Rows, Quantization, quantize

FP8_MULTIPLE = 16  # cuBLAS's FP8 products take no other sizes


@dataclass(frozen=True)
class FloatLinear:
    weight: thin.Weight

    def __call__(self, x: Tensor) -> Tensor:
        if thin.fits(x.shape[0], self.weight.values):
            return thin.product(x, self.weight)
        return F.linear(x, self.weight.values, self.weight.bias)


@dataclass(frozen=True)
class Fp8Linear:
    """Rows are quantized too, unless there are only a few."""

    weight: thin.Weight
    quantization: Quantization
    one: Tensor  # on the device: the scale of a product that is scaled later

    def __call__(self, x: Tensor) -> Tensor:
        if thin.fits(x.shape[0], self.weight.values):
            return thin.product(x, self.weight)
        return self.scaled_product(quantize(x, self.quantization), x.dtype)

    def scaled_product(self, rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
        assert self.weight.scales is not None
        return torch._scaled_mm(
            rows.values,
            self.weight.values.t(),
            rows.scales[:, None],
            self.weight.scales[None, :],
            bias=self.weight.bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )

    def product(self, rows: Fp8Rows) -> Scaled:
        """cuBLAS splits a long sum over the device only if it need not scale rows: whoever reads it will."""
        assert self.weight.scales is not None
        assert self.weight.bias is None, "a bias is added to what is scaled"
        values = torch._scaled_mm(
            rows.values, self.weight.values.t(), self.one, self.one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return Scaled(values, rows.scales, self.weight.scales)


GpuLinear = FloatLinear | Fp8Linear
