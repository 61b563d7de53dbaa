"""Bodies of `infer`: tensors as JSON and as bytes, and what is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.tensors.datatypes import DATATYPES, NUMPY
from penstock.tensors.wire import WireRequest, read_request, to_bytes, write_answer


def _read(*inputs: dict[str, Any], raw: bytes = b"", **members: Any) -> WireRequest:
    head = json.dumps({"inputs": list(inputs), **members}).encode()
    return read_request(head + raw, len(head) if raw else None)


def _x(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]} | changes


def test_values_come_flat_or_in_rows() -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]], [[1.0, 2e0], [3, 4]]):
        found = _read(_x(data=data)).inference.inputs["x"]
        assert found.dtype == np.float32
        assert found.tolist() == [[1, 2], [3, 4]]
    texts = _read(_x(datatype="BYTES", data=["a", "ü", "", "d"])).inference.inputs["x"]
    assert texts.tolist() == [[b"a", "ü".encode()], [b"", b"d"]]


def test_parameters_and_outputs_are_read() -> None:
    asked = _read(
        _x(),
        id="7",
        parameters={"priority": 2, "timeout": 1500, "binary_data_output": True},
        outputs=[{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
    )
    assert (asked.id, asked.inference.priority, asked.inference.timeout_s) == ("7", 2, 0.0015)
    assert asked.inference.outputs == ("a", "b")
    assert [asked.wants_binary(name) for name in "ab"] == [True, False]
    assert _read(_x(), parameters={"binary_data_output": True}).wants_binary("any")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"data": [1, 2, 3]}, "3 values are not those of a shape"),
        ({"data": [[1, 2, 3, 4]]}, "not those of a shape"),
        ({"data": [[1, 2], [3]]}, "lists differ in length"),
        ({"data": [1, 2, 3, "4"]}, "data is not FP32"),
        ({"data": [1, 2, 3, True]}, "data is not FP32"),
        ({"data": [1, 2, 3, None]}, "data is not FP32"),
        ({"data": [1, 2, 3, 1e300]}, "a value is no FP32"),
        ({"data": 1}, "to be a list"),
        ({"data": {"a": 1}}, "to be a list"),
        ({"data": [[[[[[[[[1]]]]]]]]]}, "to be a list"),
        ({"datatype": "INT8", "data": [1, 2, 3, 128]}, "data is not INT8"),
        ({"datatype": "UINT8", "data": [1, 2, 3, -1]}, "data is not UINT8"),
        ({"datatype": "INT32", "data": [1, 2, 3, 4.5]}, "data is not INT32"),
        ({"datatype": "BOOL", "data": [1, 0, 1, 0]}, "data is not BOOL"),
        ({"datatype": "BYTES", "data": [1, 0, 1, 0]}, "data is not BYTES"),
        ({"datatype": "FP16"}, "comes as binary data"),
        ({"datatype": "FP99"}, "is not one of BOOL"),
        ({"shape": [2, -2]}, "not negative"),
        ({"shape": [1] * 9}, "more than 8 dimensions"),
        ({"shape": [2**40, 2**40]}, "whole numbers"),
        ({"shape": [2**31, 2**31]}, "4 values are not"),
        ({"datatype": "BYTES", "shape": [2**20]}, "more than 65536 elements"),
        ({"parameters": {"shared_memory_region": "a"}}, "shared_memory_region"),
        ({"parameters": {"binary_data_size": 3}}, "has data, and"),
        ({"data": None}, "to be a list"),
    ],
)
def test_input_that_is_wrong_is_refused_by_its_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        _read(_x(**change))
    assert "x" in refused.value.message
    assert len(refused.value.message) < 300


def test_body_that_is_wrong_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="given twice"):
        _read(_x(), _x())
    for name, value, error in (
        ("sequence_id", 5, UnsupportedParameter),
        ("priority", -1, InvalidRequest),
        ("timeout", "x", InvalidRequest),
        ("binary_data_output", 1, InvalidRequest),
    ):
        with pytest.raises(error, match=name):
            _read(_x(), parameters={name: value})
    with pytest.raises(InvalidRequest, match="classification"):
        _read(_x(), outputs=[{"name": "a", "parameters": {"classification": "3"}}])
    with pytest.raises(UnsupportedParameter, match="shared_memory_region"):
        _read(_x(), outputs=[{"name": "a", "parameters": {"shared_memory_region": "a"}}])
    with pytest.raises(InvalidRequest, match="id has more"):
        _read(_x(), id="x" * 2000)
    for length in (-1, 10_000):
        with pytest.raises(InvalidRequest, match="not within the body"):
            read_request(b"{}", length)


def _binary(size: Any, datatype: str = "INT32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    ("tensor", "raw", "why"),
    [
        (_binary(8), b"1234567", "not a number of bytes that come after"),
        (_binary(True), b"1", "not a number of bytes"),
        (_binary(-1), b"1", "not a number of bytes"),
        (_binary(4), b"1234", "4 bytes are not the values"),
        (_binary(8), b"123456789", "1 bytes come after"),
        (_binary(2, "BOOL"), b"\0\2", "a byte of 0 or 1"),
        (_binary(5, "BYTES"), b"\1\0\0\0a", "end before the last"),
        (_binary(9, "BYTES"), b"\1\0\0\0a\1\0\0\0", "says it has 1 bytes, and 0"),
        (_binary(11, "BYTES"), b"\1\0\0\0a\1\0\0\0bc", "come after the last"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(tensor: dict[str, Any], raw: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        _read(tensor, raw=raw)


_NUMBERS = [dtype for name, dtype in NUMPY.items() if name != "BYTES"]


@given(st.data())
def test_tensors_come_back_as_they_went(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(_NUMBERS))
    array = data.draw(arrays(dtype, array_shapes(max_dims=3, max_side=3)))
    texts = np.array(data.draw(st.lists(st.binary(max_size=5), min_size=1, max_size=4)), dtype=object)
    found = {"x": array, "t": texts}
    heads = [
        {
            "name": name,
            "datatype": DATATYPES[one.dtype],
            "shape": one.shape,
            "parameters": {"binary_data_size": len(to_bytes(one))},
        }
        for name, one in found.items()
    ]
    asked = _read(*heads, raw=b"".join(map(to_bytes, found.values())), parameters={"binary_data_output": True})
    for name, one in found.items():
        assert to_bytes(asked.inference.inputs[name]) == to_bytes(one)
        assert asked.inference.inputs[name].shape == one.shape
    body, length = write_answer("m", "1", asked, found)
    again = json.loads(body[:length])
    assert body[length:] == b"".join(map(to_bytes, found.values()))
    assert [one["shape"] for one in again["outputs"]] == [list(array.shape), list(texts.shape)]


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_refused_or_read(data: bytes, length: int) -> None:
    with contextlib.suppress(InvalidRequest):
        read_request(data, length)


def test_answer_in_json_has_flat_values() -> None:
    asked = _read(_x(), id="a")
    found = {"y": np.array([[0.5, np.nan]], np.float32), "t": np.array([b"a"], object)}
    body, length = write_answer("m", "3", asked, found)
    assert length is None
    assert json.loads(body) == {
        "id": "a",
        "model_name": "m",
        "model_version": "3",
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [0.5, None]},
            {"name": "t", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        ],
    }
    with pytest.raises(InvalidRequest, match="binary_data"):
        write_answer("m", "1", asked, {"y": np.zeros(1, np.float16)})
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        write_answer("m", "1", asked, {"y": np.array([b"\xff"], object)})


def test_classes_are_told_within_bounds() -> None:
    asked = _read(_x(), outputs=[{"name": "a", "parameters": {"classification": 2}}])
    body, length = write_answer("m", "1", asked, {"a": np.array([[0.5, 2.0, 1.0]], np.float32)}, {"a": ["x", "y"]})
    assert length is None
    (output,) = json.loads(body)["outputs"]
    assert (output["datatype"], output["shape"], output["data"]) == ("BYTES", [1, 2], ["2.000000:1:y", "1.000000:2"])
    alone, _ = write_answer("m", "1", asked, {"a": np.arange(3)}, is_batched=False)
    assert json.loads(alone)["outputs"][0]["data"] == ["2.000000:2", "1.000000:1"]
    many = _read(_x(), outputs=[{"name": "a", "parameters": {"classification": 1 << 40}}])
    with pytest.raises(InvalidRequest, match="more than 65536 classes"):
        write_answer("m", "1", many, {"a": np.zeros((32, 1 << 12))})
    with pytest.raises(InvalidRequest, match="has no numbers"):
        write_answer("m", "1", asked, {"a": np.array([[b"x"]], object)})
