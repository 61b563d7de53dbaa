"""Datatypes of tensors under their three names: the Open Inference Protocol's, Triton's in settings, and numpy's.
Texts are bytes objects in an array of objects."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

BYTES = "BYTES"
Array: TypeAlias = npt.NDArray[Any]

_NUMPY: dict[str, npt.DTypeLike] = {
    "BOOL": np.bool_,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    BYTES: np.object_,
}
NUMPY = {name: np.dtype(kind) for name, kind in _NUMPY.items()}
DATATYPES = {dtype: name for name, dtype in NUMPY.items()}
_ONNX = {
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float16": "FP16",
    "float": "FP32",
    "double": "FP64",
    "string": BYTES,
}


def of_onnx(kind: str) -> str | None:
    """The datatype of ONNX Runtime's `tensor(float)`; None: there is none."""
    return _ONNX.get(kind.removeprefix("tensor(").removesuffix(")"))


def in_settings(datatype: str) -> str:
    """TYPE_FP32 of FP32."""
    return "TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}"
