"""The GGUF container: metadata and where each tensor lies. It knows the file format, not what a model is.

The `gguf` package's own reader makes several numpy objects per vocabulary entry: two seconds for 50,000 tokens, against
30 ms here. Dequantization is the package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.core.errors import ModelCorrupt, ModelMissing, ModelUnsupported
from penstock.hub.gguf_blocks import grouped
from penstock.hub.stored import FloatArray, GroupedTensor, Part, Stored, StoredTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", FLOAT32: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 8  # twice what ggml has
MAX_ARRAY = 1 << 24  # values of metadata, which become Python's; the largest vocabularies have a million
CHUNK_VALUES = 1 << 17  # dequantized at a time: amortises the calls; bigger temporaries cost a page fault per page


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]  # rows first, as in numpy; the file has it the other way round
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GGUFFile:
    """A file that is open, parsed and complete. Tensors are views of the mapped file until they are dequantized."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        cursor = _Cursor(self._bytes)
        try:
            self.metadata, self.tensors = _read(cursor)
        except (struct.error, ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise ModelCorrupt(f"{path} is damaged at byte {cursor.at} ({error}); {_AGAIN}") from None
        end = max((info.start + info.num_bytes for info in self.tensors.values()), default=0)
        if end > len(self._bytes):
            raise ModelCorrupt(f"{path} is cut short: {len(self._bytes):,} of {end:,} bytes; {_AGAIN}")

    def grouped(self, name: str, part: int | None = None) -> GroupedTensor | None:
        """A matrix of small integers as it is stored, if it is one; or one of several that are stacked."""
        info = self._info(name, part)
        if len(info.shape) != 2:
            return None
        return grouped(self._blocks(info), info.type, info.shape[0])

    def tensor(self, name: str, part: int | None = None) -> FloatArray:
        info = self._info(name, part)
        return self._dequantized(name, self._blocks(info), info.type).reshape(info.shape)

    def cut(self, name: str, part: int | None, wanted: Part) -> Stored:
        """Some rows and columns of a matrix. Only the blocks that hold them are read."""
        info = self._info(name, part)
        wanted.check(info.shape, name)
        block_values, block_bytes = GGML_QUANT_SIZES[info.type]
        (first, last), columns = wanted.column_range, info.shape[1]
        begin, end = first // block_values, -(-last // block_values)
        by_row = self._blocks(info).reshape(info.shape[0], columns // block_values, block_bytes)
        blocks = by_row[wanted.rows, begin:end]
        rows, width = blocks.shape[0], (end - begin) * block_values
        blocks = np.ascontiguousarray(blocks).reshape(-1, block_bytes)
        found: Stored | None = grouped(blocks, info.type, rows)
        if found is None:
            found = StoredTensor(self._dequantized(name, blocks, info.type).reshape(rows, width), "F32")
        skipped = begin * block_values
        return found.part(Part((rows, width), slice(0, rows), slice(first - skipped, last - skipped)), name)

    def _blocks(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """[blocks, bytes of a block]"""
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.start)
        return raw.reshape(-1, GGML_QUANT_SIZES[info.type][1])

    def _dequantized(self, name: str, blocks: npt.NDArray[np.uint8], type: GGMLQuantizationType) -> FloatArray:
        if type == GGMLQuantizationType.F32:
            return blocks.reshape(-1).view(np.float32)
        block_values = GGML_QUANT_SIZES[type][0]
        step = CHUNK_VALUES // block_values
        values = np.empty(len(blocks) * block_values, np.float32)
        try:
            for start in range(0, len(blocks), step):
                chunk = dequantize(blocks[start : start + step].reshape(-1), type)
                values[start * block_values : start * block_values + chunk.size] = chunk
        except NotImplementedError:
            raise ModelUnsupported(
                f"tensor {name} of {self.path} is {type.name}, which cannot be dequantized; "
                "use a file of another quantization, such as Q4_K_M or Q8_0"
            ) from None
        return values

    def _info(self, name: str, part: int | None) -> TensorInfo:
        info = self.tensors[name]
        if part is None:
            return info
        count, *shape = info.shape
        num_bytes = info.num_bytes // count
        return TensorInfo(tuple(shape), info.type, info.start + part * num_bytes, num_bytes)


_AGAIN = "delete it and download it again"


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelCorrupt(f"{path} is not a GGUF file: it does not begin with 'GGUF'; {_AGAIN}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelMissing(f"cannot read {path}: {error.strerror}; check the path") from None


class _Cursor:
    """A place in the file that moves as values are read. Reading past the end is a struct.error or a ValueError."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = len(MAGIC)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.at + length
        if end > len(self.buffer):
            raise ValueError("a string runs past the end of the file")
        text = self.buffer[self.at : end].decode()
        self.at = end
        return text

    def strings(self, count: int) -> list[str]:
        """The vocabulary's path: `string`, unrolled, because it runs a hundred thousand times at every start."""
        found: list[str] = []
        buffer, at, unpack = self.buffer, self.at, cast(Callable[..., tuple[int]], struct.Struct("<Q").unpack_from)
        for _ in range(count):
            (length,) = unpack(buffer, at)
            at += 8 + length
            found.append(buffer[at - length : at].decode())
        if at > len(buffer):
            raise ValueError("a string runs past the end of the file")
        self.at = at
        return found

    def check_room(self, count: int, min_bytes: int) -> None:
        """The check before anything is made for `count` entries of at least so many bytes."""
        if count * min_bytes > len(self.buffer) - self.at:
            raise ValueError(f"{count:,} entries run past the end of the file")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        value = self.scalar(SCALARS[kind])
        # The shortest decimal of that float32: 1e-05 as its author wrote it, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def array(self, kind: int, count: int) -> list[Any]:
        self.check_room(count, 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind]))
        if count > MAX_ARRAY:
            raise ValueError(f"an array of {count:,} values; the most is {MAX_ARRAY:,}")
        if kind == STRING:
            return self.strings(count)
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        values = np.frombuffer(self.buffer, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return cast(list[Any], values)


def _read(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelUnsupported(f"GGUF version {version:#x}; versions {VERSIONS} in little-endian order can be read")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.check_room(num_tensors, 24)  # a name's length, two counts and a place
    cursor.check_room(num_keys, 13)  # a name's length, a kind and a value
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
    tensors = dict(_read_tensor_info(cursor) for _ in range(num_tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= len(cursor.buffer):
        raise ValueError(f"an alignment of {alignment}")
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: TensorInfo(info.shape, info.type, data_start + info.start, info.num_bytes)
        for name, info in tensors.items()
    }


def _read_tensor_info(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions:,} dimensions; the most is {MAX_DIMENSIONS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    type = GGMLQuantizationType(cursor.scalar("I"))
    block_values, block_bytes = GGML_QUANT_SIZES[type]
    blocks, rest = divmod(math.prod(shape), block_values)
    if rest:
        raise ValueError(f"tensor {name} of shape {shape} is not a whole number of {type.name} blocks")
    return name, TensorInfo(shape, type, cursor.scalar("Q"), blocks * block_bytes)
