"""`infer` with tensors as the Open Inference Protocol has it: JSON, with Triton's binary extension. Arrays come out of
a body, and go into one.

Nothing is made of a shape before it is known to fit what was sent. Values in JSON are strictly of their datatype;
`FP16` has no JSON, as in Triton. A message makes the same body over gRPC (`oip.tensor_messages`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.api.decoding import WireStruct, decode
from penstock.core.config import shown
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.tensors.datatypes import BYTES, DATATYPES, NUMPY, Array
from penstock.tensors.served_model import Inference

_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"
_CLASSES = "classification"
_MAX_DIMENSIONS = 8
_MAX_TEXTS = 1 << 16  # elements of a BYTES tensor: each becomes an object
_MAX_ID = 1024  # characters


class _Input(WireStruct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _Output(WireStruct):
    name: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _Body(WireStruct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    outputs: list[_Output] = msgspec.field(default_factory=list)


class WireRequest(NamedTuple):
    inference: Inference
    id: str
    binary: frozenset[str]  # outputs that are wanted as bytes, of those that are named
    is_binary: bool  # the others
    classes: Mapping[str, int] = {}  # outputs of which so many of the likeliest classes are wanted, and no numbers

    def wants_binary(self, output: str) -> bool:
        return output in self.binary or (self.is_binary and output not in self.inference.outputs)


_decoder = msgspec.json.Decoder(_Body)
_encode = msgspec.json.encode
_PLAIN: dict[str, Any] = {"b": bool, "i": int, "u": int, "f": float, "O": str}  # by numpy's kinds
_decoders: dict[tuple[str, int], msgspec.json.Decoder[Any]] = {}


def read_request(body: bytes, json_length: int | None) -> WireRequest:
    """`json_length`: where the JSON ends and bytes begin; None: there are none. Raises InvalidRequest."""
    length = len(body) if json_length is None else json_length
    if not 0 <= length <= len(body):
        raise InvalidRequest(f"the JSON's length is not within the body, which has {len(body)} bytes")
    head = decode(_decoder, body[:length] if length != len(body) else body)
    if len(head.id) > _MAX_ID:
        raise InvalidRequest(f"id has more than {_MAX_ID} characters", param="id")
    inputs: dict[str, Array] = {}
    at = length
    for one in head.inputs:
        if one.name in inputs:
            raise InvalidRequest(f"'{shown(one.name)}' is given twice", param=shown(one.name))
        size = one.parameters.pop(_SIZE, None)
        _refuse_others(one.name, one.parameters)
        if size is None:
            inputs[one.name] = _listed(one)
        else:
            end = at + _checked_size(one, size, len(body) - at)
            inputs[one.name], at = _raw(one, body[at:end]), end
    if at != len(body):
        raise InvalidRequest(f"{len(body) - at} bytes come after the last binary tensor")
    parameters = head.parameters
    is_binary = _flag(parameters.pop(_ALL_BINARY, False), _ALL_BINARY)
    priority, timeout_us = _whole(parameters, "priority"), _whole(parameters, "timeout")
    for name in parameters:
        raise UnsupportedParameter(f"the parameter '{shown(name)}' is not known", param=shown(name))
    outputs: dict[str, bool] = {}
    classes: dict[str, int] = {}
    for output in head.outputs:
        outputs[output.name] = _flag(output.parameters.pop(_BINARY, is_binary), _BINARY)
        if count := _whole(output.parameters, _CLASSES):
            classes[output.name] = count
        _refuse_others(output.name, output.parameters)
    asked = Inference(inputs, tuple(outputs), priority, timeout_us / 1e6 if timeout_us else None)
    return WireRequest(
        asked, head.id, frozenset(name for name, binary in outputs.items() if binary), is_binary, classes
    )


def write_answer(
    model: str,
    version: str,
    asked: WireRequest,
    found: Mapping[str, Array],
    labels: Mapping[str, Sequence[str]] = {},
    *,
    is_batched: bool = True,
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if bytes come after it. `labels`: of classes, by output."""
    outputs, raws = [], []
    for name, given in found.items():
        count = asked.classes.get(name)
        array = given if count is None else _classes(name, given, count, labels.get(name, ()), is_batched=is_batched)
        datatype = DATATYPES[array.dtype]
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if asked.wants_binary(name):
            raws.append(to_bytes(array))
            output["parameters"] = {_SIZE: len(raws[-1])}
        else:
            output["data"] = _values(name, datatype, array)
        outputs.append(output)
    head: dict[str, Any] = {"id": asked.id} if asked.id else {}
    encoded = _encode(head | {"model_name": model, "model_version": version, "outputs": outputs})
    return (b"".join([encoded, *raws]), len(encoded)) if raws else (encoded, None)


def to_bytes(array: Array) -> bytes:
    """Raw bytes of a tensor: little-endian; texts each behind their length."""
    if array.dtype == object:
        return b"".join([b"%b%b" % (struct.pack("<I", len(one)), one) for one in array.flat])
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


# -- inside


def _classes(name: str, array: Array, count: int, labels: Sequence[str], *, is_batched: bool) -> Array:
    """The likeliest classes of each row, the first one first, as texts `value:number:label`."""
    if array.dtype == object or not array.size:
        raise InvalidRequest(f"'{name}' has no numbers to tell classes by", param=name)
    rows = array.reshape(array.shape[0] if is_batched else 1, -1)
    if rows.shape[0] * min(count, rows.shape[1]) > _MAX_TEXTS:
        raise InvalidRequest(f"'{name}': more than {_MAX_TEXTS} classes are asked for", param=name)
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    found = np.empty(best.shape, object)
    for (row, place), number in np.ndenumerate(best):
        label = f":{labels[int(number)]}" if number < len(labels) else ""
        found[row, place] = f"{float(rows[row, number]):f}:{number}{label}".encode()
    return found if is_batched else found[0]


def _values(name: str, datatype: str, array: Array) -> Any:
    if datatype == "FP16":
        raise InvalidRequest(f"'{name}' is FP16, which JSON does not have: ask for it with binary_data", param=name)
    flat = array.reshape(-1)
    if datatype == BYTES:
        try:
            return [one.decode() for one in flat]
        except UnicodeDecodeError:
            raise InvalidRequest(f"'{name}' is not UTF-8: ask for it with binary_data", param=name) from None
    return flat.tolist()  # what is not finite is null: JSON has no word for it


def _shape(one: _Input) -> tuple[tuple[int, ...], int]:
    """The dimensions, and the number of elements."""
    if len(one.shape) > _MAX_DIMENSIONS:
        raise _refused(one, f"its shape has more than {_MAX_DIMENSIONS} dimensions")
    if any(size < 0 or size >= 1 << 32 for size in one.shape):
        raise _refused(one, "its shape is to be a list of whole numbers that are not negative")
    if one.datatype not in NUMPY:
        raise _refused(one, f"the datatype '{shown(one.datatype)}' is not one of {', '.join(NUMPY)}")
    count = math.prod(one.shape)
    if one.datatype == BYTES and count > _MAX_TEXTS:
        raise _refused(one, f"it has more than {_MAX_TEXTS} elements")
    return tuple(one.shape), count


def _raw(one: _Input, data: bytes) -> Array:
    shape, count = _shape(one)
    dtype = NUMPY[one.datatype]
    if one.datatype == BYTES:
        return _texts(_split(one, data, count), shape)
    if len(data) != count * dtype.itemsize:
        raise _refused(one, f"{len(data)} bytes are not the values of a shape {list(shape)} of {one.datatype}")
    if one.datatype == "BOOL" and data.strip(b"\0\1"):
        raise _refused(one, "a BOOL is a byte of 0 or 1")
    found: Array = np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)
    return found.astype(dtype, copy=False)


def _listed(one: _Input) -> Array:
    shape, count = _shape(one)
    raw = bytes(one.data)
    if not raw:
        raise _refused(one, "it has no data")
    if one.datatype == "FP16":
        raise _refused(one, "FP16 comes as binary data: JSON has no such numbers")
    dtype = NUMPY[one.datatype]
    values = _decode_list(one, raw, dtype.kind)
    try:
        if one.datatype == BYTES:
            array = np.array(values, dtype=object)
            found = np.array([text.encode() for text in array.reshape(-1)], dtype=object)
        else:
            with np.errstate(over="ignore"):
                found = np.array(values, dtype=dtype)
    except (ValueError, OverflowError, AttributeError, UnicodeEncodeError):
        raise _refused(one, f"its data is not {one.datatype}, or its lists differ in length") from None
    if found.size != count or (found.ndim > 1 and found.shape != shape):
        raise _refused(one, f"{found.size} values are not those of a shape {list(shape)}")
    if dtype.kind == "f" and not np.isfinite(found).all():
        raise _refused(one, f"a value is no {one.datatype}")
    return found.reshape(shape)


def _decode_list(one: _Input, raw: bytes, kind: str) -> Any:
    """The list, perhaps of lists, decoded as what it is to be."""
    depth = 0
    for byte in raw[:64]:
        if byte == ord("["):
            depth += 1
        elif byte not in b" \t\r\n":
            break
    if not 1 <= depth <= _MAX_DIMENSIONS:
        raise _refused(one, "its data is to be a list")
    decoder = _decoders.get((kind, depth))
    if decoder is None:
        type_: Any = _PLAIN[kind]
        for _ in range(depth):
            type_ = list[type_]
        decoder = _decoders[kind, depth] = msgspec.json.Decoder(type_)
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _refused(one, f"its data is not {one.datatype}") from None


def _texts(texts: list[bytes], shape: tuple[int, ...]) -> Array:
    found = np.empty(len(texts), dtype=object)
    found[:] = texts
    return found.reshape(shape)


def _split(one: _Input, data: bytes, count: int) -> list[bytes]:
    found, at = [], 0
    for _ in range(count):
        if at + 4 > len(data):
            raise _refused(one, f"its bytes end before the last of {count} elements")
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > len(data) - at:
            raise _refused(one, f"an element says it has {length} bytes, and {len(data) - at} are there")
        found.append(data[at : at + length])
        at += length
    if at != len(data):
        raise _refused(one, f"{len(data) - at} bytes come after the last of {count} elements")
    return found


def _checked_size(one: _Input, size: object, left: int) -> int:
    if bytes(one.data):
        raise _refused(one, f"it has data, and {_SIZE} besides")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= left:
        raise _refused(one, f"{_SIZE} is not a number of bytes that come after the JSON, {left}")
    return size


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is to be true or false", param=name)
    return value


def _whole(parameters: dict[str, Any], name: str) -> int:
    value = parameters.pop(name, 0)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{name} is to be a whole number that is not negative", param=name)
    return value


def _refuse_others(name: str, parameters: Mapping[str, object]) -> None:
    for other in parameters:
        raise UnsupportedParameter(f"{shown(name)}: its parameter '{shown(other)}' is not known", param=shown(other))


def _refused(one: _Input, why: str) -> InvalidRequest:
    return InvalidRequest(f"{shown(one.name)}: {why}", param=shown(one.name))
