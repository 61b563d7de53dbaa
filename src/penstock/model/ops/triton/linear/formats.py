"""Linears in 16 bits, FP8 and W8A8, one class per format: `gemv` for up to 16 rows, where reading weights is the limit;
for more cuBLAS, or `w8a8`, where arithmetic is. Those files and docs/benchmarks.md have the shares: with cuBLAS's
products a prefill of 8B reaches 83 % of the arithmetic in bf16 and 78 % in FP8 (W6).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.ops import Norm, Scaled
from penstock.model.ops.triton.common.rowwise import Quantization, QuantizedRows, quantize
from penstock.model.ops.triton.linear import gemv, w8a8
from penstock.model.ops.triton.linear.gemv import Epilogue

MULTIPLE = 16  # cuBLAS's 8-bit products take no other sizes


class GpuLinear(Protocol):
    @property
    def has_bias(self) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor: ...

    def can_gemv(self, num_rows: int, epilogue: Epilogue = Epilogue.NONE) -> bool:
        """Whether `gemv` can multiply so many rows."""

    def can_fuse_norm(self, num_rows: int) -> bool:
        """Whether `gemv` can norm so many rows itself."""

    def gemv(self, x: Tensor, *, norm: Norm | None = None, epilogue: Epilogue, into: Tensor | None = None) -> Tensor:
        """The product of a few rows, with what is before it and behind it; see `gemv.product`."""


@dataclass(frozen=True)
class GemvLinear:
    """A weight that `gemv.product` multiplies with a few rows."""

    weight: gemv.Weight

    @property
    def has_bias(self) -> bool:
        return self.weight.bias is not None

    def can_gemv(self, num_rows: int, epilogue: Epilogue = Epilogue.NONE) -> bool:
        return gemv.fits(num_rows, self.weight.values)

    def can_fuse_norm(self, num_rows: int) -> bool:
        return gemv.can_norm(num_rows, self.weight.values)

    def gemv(self, x: Tensor, *, norm: Norm | None = None, epilogue: Epilogue, into: Tensor | None = None) -> Tensor:
        return gemv.product(x, self.weight, norm=norm, epilogue=epilogue, into=into)


@dataclass(frozen=True)
class FloatLinear(GemvLinear):
    def __call__(self, x: Tensor) -> Tensor:
        if self.can_gemv(x.shape[0]):
            return self.gemv(x, epilogue=Epilogue.NONE)
        return F.linear(x, self.weight.values, self.weight.bias)


@dataclass(frozen=True)
class ByteLinear(GemvLinear, ABC):
    """A weight of 8 bits, with a scale per output. Rows become 8 bits too."""

    quantization: Quantization

    def __call__(self, x: Tensor) -> Tensor:
        if self.can_gemv(x.shape[0]):
            return self.gemv(x, epilogue=Epilogue.NONE)
        return self.scaled_product(quantize(x, self.quantization), x.dtype)

    @abstractmethod
    def scaled_product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor: ...

    def product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor | Scaled:
        """The product for a reader that can scale it on its way. There must be no bias."""
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
    def can_gemv(self, num_rows: int, epilogue: Epilogue = Epilogue.NONE) -> bool:
        return False

    def scaled_product(self, rows: QuantizedRows, dtype: torch.dtype) -> Tensor:
        return w8a8.product(rows, self.weight, dtype)
