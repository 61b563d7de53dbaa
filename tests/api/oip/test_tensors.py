"""Tensors from anybody: what was written is read, and anything else is refused by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.oip.tensors import Tensor, listed_tensor, raw_tensor, write_texts
from penstock.core.errors import InvalidRequest

_shapes = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=10)


def _tensor_or_refusal(read: Callable[..., Tensor], *arguments: Any) -> Tensor | InvalidRequest:
    try:
        return read("t", *arguments)
    except InvalidRequest as refused:
        return refused


@given(st.lists(st.text(max_size=20), max_size=8))
def test_texts_come_back_as_they_were_written(texts: list[str]) -> None:
    assert raw_tensor("t", "BYTES", [len(texts)], write_texts(texts)).values == texts
    assert listed_tensor("t", "BYTES", [len(texts), 1], [[text] for text in texts]).values == texts


@given(st.sampled_from(["BYTES", "BOOL", "INT64", "FP16", "FP32", "BF16", ""]), _shapes, st.binary(max_size=64))
def test_raw_bytes_are_values_of_their_shape_or_refused_by_name(datatype: str, shape: list[int], raw: bytes) -> None:
    found = _tensor_or_refusal(raw_tensor, datatype, shape, raw)
    assert found.param == "t" if isinstance(found, InvalidRequest) else len(found.values) == math.prod(shape)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(st.sampled_from(["BYTES", "BOOL", "INT8", "UINT64", "FP16", "FP64", "x"]), _shapes, _json)
def test_listed_data_are_values_of_their_shape_or_refused_by_name(datatype: str, shape: list[int], data: Any) -> None:
    found = _tensor_or_refusal(listed_tensor, datatype, shape, data)
    assert found.param == "t" if isinstance(found, InvalidRequest) else len(found.values) == math.prod(shape)


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "why"),
    [
        ("BYTES", [1], struct.pack("<I", 2**32 - 1) + b"x", "says it has 4294967295 bytes"),
        ("BYTES", [2], struct.pack("<I", 1) + b"x", "end before the last"),
        ("BYTES", [1], struct.pack("<I", 1) + b"xy", "come after the last"),
        ("BYTES", [1], struct.pack("<I", 1) + b"\xff", "UTF-8"),
        ("BYTES", [2**40], b"", "more than 2048 elements"),
        ("INT32", [-1], b"", "not negative"),
        ("INT32", [2], b"\0\0\0\0", "4 bytes are not the values"),
        ("FP32", [1], struct.pack("<f", math.inf), "finite"),
    ],
)
def test_malformed_tensors_are_refused_with_the_reason(datatype: str, shape: list[int], raw: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        raw_tensor("t", datatype, shape, raw)
