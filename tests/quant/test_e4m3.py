"""Quantized weights: what is kept, what is lost, and that no row harms another."""

from __future__ import annotations

import pytest
import torch

from penstock.quant import e4m3
from penstock.quant.e4m3 import quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_keeps_three_bits_of_mantissa(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(40, 96) * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    small = quantized(weight)
    assert small.values.dtype is torch.float8_e4m3fn
    wide = weight.float()
    error = (small.dequantized() - wide).abs()
    smallest = small.scales[:, None] * 2.0**-9  # of FP8's subnormal numbers
    assert (error <= torch.maximum(wide.abs() * 2.0**-4, smallest)).all()


def test_the_largest_of_a_row_is_exact_and_an_outlier_harms_only_its_row() -> None:
    weight = torch.randn(3, 64)
    alone = quantized(weight)
    weight[1, 5] = 1e4
    small = quantized(weight)
    torch.testing.assert_close(small.dequantized()[1, 5], torch.tensor(1e4))
    for row in (0, 2):
        assert torch.equal(small.dequantized()[row], alone.dequantized()[row])


def test_a_row_of_zeros_stays_zero() -> None:
    assert not quantized(torch.zeros(2, 16)).dequantized().any()


def test_rows_are_quantized_alike_however_many_are_taken_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(10, 32)
    whole = quantized(weight)
    monkeypatch.setattr(e4m3, "_ROWS", 3)
    parts = quantized(weight)
    assert torch.equal(parts.values.float(), whole.values.float())
    assert torch.equal(parts.scales, whole.scales)
