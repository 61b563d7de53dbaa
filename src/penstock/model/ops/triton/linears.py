"""Weights on a GPU, one class per format, and what multiplies with them: our kernels for a few rows, for many cuBLAS or
what its format asks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Norm, Scaled
from penstock.model.ops.triton import int8, thin
from penstock.model.ops.triton.rowwise import Quantization, QuantizedRows, quantize
from penstock.model.ops.triton.thin import Ending

MULTIPLE = 16  # cuBLAS's 8-bit products take no other sizes


class GpuLinear(Protocol):
    @property
    def has_bias(self) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def takes(self, num_rows: int, ending: Ending = Ending.NOTHING) -> bool:
        """Whether `few` can."""

    def norms(self, num_rows: int) -> bool:
        """Whether `few` can norm so many rows itself."""

    def few(self, x: Tensor, *, norm: Norm | None = None, ending: Ending, into: Tensor | None = None) -> Tensor:
        """The product of a few rows, with what is before it and behind it; see `thin.product`."""


@dataclass(frozen=True)
class ThinLinear:
    """A weight that `thin` multiplies with a few rows."""

    weight: thin.Weight

    @property
    def has_bias(self) -> bool:
        return self.weight.bias is not None

    def takes(self, num_rows: int, ending: Ending = Ending.NOTHING) -> bool:
        return thin.fits(num_rows, self.weight.values)

    def norms(self, num_rows: int) -> bool:
        return thin.can_norm(num_rows, self.weight.values)

    def few(self, x: Tensor, *, norm: Norm | None = None, ending: Ending, into: Tensor | None = None) -> Tensor:
        return thin.product(x, self.weight, norm=norm, ending=ending, into=into)


@dataclass(frozen=True)
class FloatLinear(ThinLinear):
    def __call__(self, x: Tensor) -> Tensor:
        if self.takes(x.shape[0]):
            return self.few(x, ending=Ending.NOTHING)
        return F.linear(x, self.weight.values, self.weight.bias)


@dataclass(frozen=True)
class ByteLinear(ThinLinear, ABC):
    """Of 8 bits, with a scale per output. Rows become 8 bits too."""

    quantization: Quantization

    def __call__(self, x: Tensor) -> Tensor:
        if self.takes(x.shape[0]):
            return self.few(x, ending=Ending.NOTHING)
        return self.scaled_product(quantize(x, self.quantization), x.dtype)

    @abstractmethod
    def scaled_product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor: ...

    def product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor | Scaled:
        """For whoever can scale it on its way. There must be no bias."""
        return self.scaled_product(rows, dtype)


@dataclass(frozen=True)
class Fp8Linear(ByteLinear):
    """A few rows are not quantized."""

    one: Tensor  # on the device: the scale of a product that is scaled later

    def scaled_product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
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

    def product(self, rows: QuantizedRows, dtype: torch.dtype) -> Scaled:
        """cuBLAS splits a long sum over the device only if it need not scale rows: whoever reads it will."""
        assert self.weight.scales is not None
        values = torch._scaled_mm(
            rows.values, self.weight.values.t(), self.one, self.one, out_dtype=dtype, use_fast_accum=True
        )
        return Scaled(values, rows.scales, self.weight.scales)


@dataclass(frozen=True)
class Int8Linear(ByteLinear):
    def takes(self, num_rows: int, ending: Ending = Ending.NOTHING) -> bool:
        return False

    def scaled_product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        return int8.product(rows, self.weight, dtype)
