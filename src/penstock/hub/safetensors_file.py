"""The safetensors container, read through the `safetensors` library and written a tensor at a time. It knows the file
format, not what a model is.

The library checks the header and its offsets. Tensors are views of the mapped file, as bits: numpy, in which the
library would copy them, has neither bfloat16 nor float8.
"""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.disk import written_whole
from penstock.hub.stored import STORED_AS, FloatArray, NumberFormat, StoredTensor, narrow_bfloat16

DType = Literal["float32", "bfloat16", "float16"]
CODES: dict[DType, NumberFormat] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
INTEGERS: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}
HEADER_BYTES_PER_TENSOR = 256  # room kept for the header: a name, a type, two dimensions and two offsets
COPY_BYTES = 1 << 26
MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    code: str
    start: int  # in the file
    num_bytes: int


class SafetensorsFile:
    """A file that is open, parsed and complete. Tensors are read-only views of the mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelMissing(f"cannot read {path}: {error.strerror}; download the model again") from None
        except ValueError:  # an empty file cannot be mapped
            raise ModelCorrupt(f"{path} is empty; download it again") from None
        try:
            with safe_open(path, "numpy") as header:
                self.notes: dict[str, str] = header.metadata() or {}
                self.tensors = dict(_placed(header, 8 + int.from_bytes(self._bytes[:8], "little")))
        except (SafetensorError, ValueError) as error:
            raise ModelCorrupt(f"{path} is damaged or cut short ({error}); download it again") from None

    def stored(self, name: str) -> StoredTensor:
        info = self.tensors[name]
        if info.code not in STORED_AS:
            raise ModelUnsupported(f"tensor {name} of {self.path} is {info.code}; supported: {', '.join(STORED_AS)}")
        return StoredTensor(self._array(name, STORED_AS[info.code]), info.code)

    def integers(self, name: str) -> npt.NDArray[Any]:
        """A tensor of whole numbers, such as packed weights."""
        code = self.tensors[name].code
        if code not in INTEGERS:
            raise ModelUnsupported(f"tensor {name} of {self.path} is {code}, not one of {', '.join(INTEGERS)}")
        return self._array(name, INTEGERS[code])

    def _array(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        info = self.tensors[name]
        return np.ndarray(info.shape, dtype, self._bytes, info.start)


def _placed(header: Any, start: int) -> Iterator[tuple[str, TensorInfo]]:
    """Tensors with their place in the file: they lie one behind the other, which the library has checked."""
    for name in header.offset_keys():
        tensor = header.get_slice(name)
        shape, code = tuple(tensor.get_shape()), tensor.get_dtype()
        if len(shape) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {len(shape)} dimensions")
        num_bytes = math.prod(shape) * _bits(code) // 8
        yield name, TensorInfo(shape, code, start, num_bytes)
        start += num_bytes


def _bits(code: str) -> int:
    """Bits of a number: BF16 has 16, F8_E4M3 has 8."""
    digits = re.match(r"[A-Z]+(\d+)", code)
    return int(digits[1]) if digits else 8  # BOOL


@dataclass(frozen=True)
class Written:
    """A tensor as a file is to have it: floats, narrowed while they are written, or integers and bits as they are."""

    values: npt.NDArray[Any]
    code: str  # of STORED_AS or INTEGERS


def write_safetensors(path: Path, tensors: Iterable[tuple[str, FloatArray]], num_tensors: int, dtype: DType) -> None:
    """All in one number format."""
    write_tensors(path, ((name, Written(values, CODES[dtype])) for name, values in tensors), num_tensors)


def write_tensors(
    path: Path, tensors: Iterable[tuple[str, Written]], num_tensors: int, notes: Mapping[str, str] | None = None
) -> None:
    """One tensor in memory at a time: the header comes last, into room kept for it, padded as the format allows."""
    metadata = {"format": "pt", **(notes or {})}
    room = HEADER_BYTES_PER_TENSOR * (num_tensors + 1) + len(json.dumps(metadata))
    header: dict[str, Any] = {"__metadata__": metadata}
    with written_whole(path) as file:
        file.seek(8 + room)
        for name, tensor in tensors:
            start = file.tell() - 8 - room
            _write_values(file, tensor)
            end = file.tell() - 8 - room
            header[name] = {"dtype": tensor.code, "shape": list(tensor.values.shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode().ljust(room)
        assert len(text) == room, "the header outgrew its room"
        file.seek(0)
        file.write(len(text).to_bytes(8, "little") + text)


def _write_values(file: BinaryIO, tensor: Written) -> None:
    stored_as = INTEGERS[tensor.code] if tensor.code in INTEGERS else STORED_AS[cast(NumberFormat, tensor.code)]
    flat = np.ascontiguousarray(tensor.values).reshape(-1)
    for start in range(0, flat.size, COPY_BYTES // 4):
        part = flat[start : start + COPY_BYTES // 4]
        if tensor.code == "BF16" and part.dtype == np.float32:
            part = narrow_bfloat16(part)
        file.write(part.astype(stored_as, copy=False).data)
