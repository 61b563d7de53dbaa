"""Tensors of the Open Inference Protocol as they come from anybody: checked, and as plain values.

A tensor's values are raw bytes (little-endian; texts each behind their length in four bytes), or a list. Nothing is
made of a shape before it is known to fit what was sent.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.core.errors import InvalidRequest

MAX_ELEMENTS = 2048  # of a tensor: no request has more texts
_MAX_DIMENSIONS = 8
_MAX_NAME = 100  # characters of a client's own words that an error repeats

Value = bool | int | float | str

BYTES = "BYTES"
_FORMATS = {
    "BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I",
    "UINT64": "Q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


class Tensor(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Value]  # bool, int, float, or str for BYTES


def raw_tensor(name: str, datatype: str, shape: Sequence[object], raw: bytes) -> Tensor:
    """Raises InvalidRequest, about the tensor by its name."""
    dimensions = _check_shape(name, shape)
    count = math.prod(dimensions)
    if datatype == BYTES:
        return Tensor(name, datatype, dimensions, list(_split_texts(name, raw, count)))
    code = _format(name, datatype)
    if len(raw) != count * struct.calcsize(f"<{code}"):
        raise _refused(name, f"{len(raw)} bytes are not the values of a shape {list(dimensions)} of {datatype}")
    return Tensor(name, datatype, dimensions, _finite(name, struct.unpack(f"<{count}{code}", raw)))


def listed_tensor(name: str, datatype: str, shape: Sequence[object], values: object) -> Tensor:
    """`values`: a list, perhaps of lists. Raises InvalidRequest, about the tensor by its name."""
    dimensions = _check_shape(name, shape)
    if not isinstance(values, list):
        raise _refused(name, "its data is to be a list")
    flat = _flatten(name, values)
    if len(flat) != math.prod(dimensions):
        raise _refused(name, f"{len(flat)} values are not those of a shape {list(dimensions)}")
    if datatype != BYTES:
        _format(name, datatype)
    return Tensor(name, datatype, dimensions, _finite(name, [_listed(name, datatype, value) for value in flat]))


def write_texts(texts: Iterable[str]) -> bytes:
    """Raw bytes of a BYTES tensor."""
    encoded = [text.encode() for text in texts]
    return b"".join([b"%b%b" % (struct.pack("<I", len(one)), one) for one in encoded])


def _split_texts(name: str, raw: bytes, count: int) -> Iterable[str]:
    at = 0
    for _ in range(count):
        if at + 4 > len(raw):
            raise _refused(name, f"its bytes end before the last of {count} elements")
        (length,) = struct.unpack_from("<I", raw, at)
        at += 4
        if length > len(raw) - at:
            raise _refused(name, f"an element says it has {length} bytes, and {len(raw) - at} are there")
        yield _text(name, raw[at : at + length])
        at += length
    if at != len(raw):
        raise _refused(name, f"{len(raw) - at} bytes come after the last of {count} elements")


def _check_shape(name: str, shape: Sequence[object]) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMENSIONS:
        raise _refused(name, f"its shape has more than {_MAX_DIMENSIONS} dimensions")
    dimensions = []
    for one in shape:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise _refused(name, "its shape is to be a list of whole numbers that are not negative")
        dimensions.append(one)
    if math.prod(dimensions) > MAX_ELEMENTS:
        raise _refused(name, f"it has more than {MAX_ELEMENTS} elements")
    return tuple(dimensions)


def _format(name: str, datatype: str) -> str:
    if datatype not in _FORMATS:
        known = ", ".join([*_FORMATS, BYTES])
        raise _refused(name, f"the datatype '{_shown(datatype)}' is not one of {known}")
    return _FORMATS[datatype]


def _flatten(name: str, values: list[object]) -> list[object]:
    """Lists in lists, as far down as a shape goes."""
    flat: list[object] = values
    for _ in range(_MAX_DIMENSIONS):
        if len(flat) > MAX_ELEMENTS:
            raise _refused(name, f"it has more than {MAX_ELEMENTS} elements")
        if not any(isinstance(one, list) for one in flat):
            return flat
        flat = [inner for one in flat for inner in (one if isinstance(one, list) else [one])]
    raise _refused(name, "its data has more lists in lists than a shape has dimensions")


def _listed(name: str, datatype: str, value: object) -> Value:
    if datatype == BYTES:
        if isinstance(value, bytes):
            return _text(name, value)
        if isinstance(value, str):
            return value
    elif datatype == "BOOL":
        if isinstance(value, bool):
            return value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            struct.pack(f"<{_FORMATS[datatype]}", value)
        except (struct.error, OverflowError):
            raise _refused(name, f"{_shown(str(value))} is no {datatype}") from None
        return value
    raise _refused(name, f"its data is not {datatype}")


def _finite(name: str, values: Iterable[Value]) -> list[Value]:
    found = list(values)
    if any(isinstance(value, float) and not math.isfinite(value) for value in found):
        raise _refused(name, "a value is not a finite number")
    return found


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _refused(name, "an element is not UTF-8") from None


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{_shown(name)}: {why}", param=_shown(name))


def _shown(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
