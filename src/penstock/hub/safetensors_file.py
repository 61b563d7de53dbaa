"""The safetensors container: a JSON header, then the tensors' bytes. It knows the file format, not what a model is.

Read and written here rather than with the library because numpy has neither bfloat16 nor float8.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

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
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMENSIONS = 8

_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    code: str
    start: int
    end: int


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
            self.notes, self.tensors = _read_header(self._bytes)
        except (ValueError, RecursionError) as error:
            raise ModelCorrupt(f"{path} has a damaged header ({error}); download it again") from None
        end = max((info.end for info in self.tensors.values()), default=0)
        if end > len(self._bytes):
            raise ModelCorrupt(f"{path} is cut short: {len(self._bytes):,} of {end:,} bytes; download it again")

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
        count = math.prod(info.shape)
        if count * dtype.itemsize != info.end - info.start:
            raise ModelCorrupt(f"tensor {name} of {self.path} has the wrong size; download it again")
        return np.frombuffer(self._bytes, dtype, count, info.start).reshape(info.shape)


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


def _read_header(buffer: mmap.mmap) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """What the writer noted, and the tensors."""
    num_bytes = int.from_bytes(buffer[:8], "little")
    data_start = 8 + num_bytes
    if data_start > len(buffer):
        raise ValueError("it runs past the end of the file")
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"{num_bytes:,} bytes; the most is {MAX_HEADER_BYTES:,}")
    entries = msgspec.json.decode(buffer[8:data_start], type=dict[str, msgspec.Raw])
    noted = entries.pop("__metadata__", None)
    notes = msgspec.json.decode(noted, type=dict[str, str] | None) if noted is not None else None
    found = {name: _entries.decode(entry) for name, entry in entries.items()}
    for name, entry in found.items():
        if entry.data_offsets[0] > entry.data_offsets[1]:
            raise ValueError(f"tensor {name} ends before it begins")
    return notes or {}, {
        name: TensorInfo(
            shape=tuple(entry.shape),
            code=entry.dtype,
            start=data_start + entry.data_offsets[0],
            end=data_start + entry.data_offsets[1],
        )
        for name, entry in found.items()
    }


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: Annotated[list[_Count], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


_entries = msgspec.json.Decoder(_Entry)
