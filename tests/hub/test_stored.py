from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.hub.stored import STORED_AS, NumberFormat, StoredTensor, e4m3_values, narrow_bfloat16


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1))
def test_bfloat16_rounds_as_torch_does(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    ours = torch.from_numpy(narrow_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(ours.isnan(), theirs.isnan())


def test_every_bit_pattern_of_float8_means_what_torch_takes_it_for() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(e4m3_values(), theirs.numpy())


@pytest.mark.parametrize(
    ("format", "dtype"), [("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)]
)
def test_widening_loses_nothing(format: NumberFormat, dtype: torch.dtype) -> None:
    numbers = torch.randn(7, 5).to(dtype)
    bits = np.frombuffer(numbers.flatten().view(torch.uint8).numpy().tobytes(), STORED_AS[format]).reshape(7, 5)
    np.testing.assert_array_equal(StoredTensor(bits, format).widened(), numbers.float().numpy())


def test_rows_of_float8_are_multiplied_with_their_scales() -> None:
    numbers = torch.randn(3, 5).to(torch.float8_e4m3fn)
    scales = np.array([0.5, 2.0, 3.0], np.float32)
    stored = StoredTensor(numbers.view(torch.uint8).numpy(), "F8_E4M3", scales)
    np.testing.assert_array_equal(stored.widened(), numbers.float().numpy() * scales[:, None])


def test_a_float32_tensor_is_not_copied() -> None:
    values = np.ones((2, 3), np.float32)
    assert StoredTensor(values, "F32").widened() is values
