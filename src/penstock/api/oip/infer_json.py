"""`infer` as JSON, with Triton's binary extension: tensors whose values come after the JSON as they are in memory, and
go back so. The header Inference-Header-Content-Length says where the JSON ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.api.decoding import WireStruct, decode
from penstock.api.oip.answer import Generated
from penstock.api.oip.request import DEFAULT_VERSION, FINISH_REASON, TEXT_OUTPUT, InferenceRequest, from_tensors
from penstock.api.oip.tensors import BYTES, Tensor, listed_tensor, raw_tensor, write_texts
from penstock.core.config import shown
from penstock.core.errors import InvalidRequest, UnsupportedParameter

HEADER_LENGTH = b"inference-header-content-length"
_SIZE, _BINARY, _ALL_BINARY = "binary_data_size", "binary_data", "binary_data_output"


class _Input(WireStruct):
    name: str
    datatype: str
    shape: list[int]
    data: Any = msgspec.UNSET
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _Output(WireStruct):
    name: str
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _Body(WireStruct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    outputs: list[_Output] = msgspec.field(default_factory=list)


_decoder = msgspec.json.Decoder(_Body)


class JsonInference(NamedTuple):
    request: InferenceRequest
    binary: frozenset[str]  # outputs that are wanted as bytes


def read_inference(model: str, version: str, headers: Mapping[bytes, bytes], content: bytes) -> JsonInference:
    """Raises InvalidRequest."""
    length = _json_length(headers, len(content))
    body = decode(_decoder, content[:length])
    tensors, at = [], length
    for one in body.inputs:
        size = one.parameters.pop(_SIZE, None)
        _refuse_others(one.name, one.parameters)
        if size is None:
            if one.data is msgspec.UNSET:
                raise InvalidRequest(f"{shown(one.name)} has no data", param=shown(one.name))
            tensors.append(listed_tensor(one.name, one.datatype, one.shape, one.data))
            continue
        tensor, at = _binary_tensor(one, size, content, at)
        tensors.append(tensor)
    if at != len(content):
        raise InvalidRequest(f"{len(content) - at} bytes come after the last binary tensor")
    is_binary = body.parameters.get(_ALL_BINARY, False)
    if not isinstance(is_binary, bool):
        raise InvalidRequest(f"{_ALL_BINARY} is to be true or false", param=_ALL_BINARY)
    wanted = {one.name: _is_binary(one, is_binary) for one in body.outputs}
    request = from_tensors(model, version, body.id, tensors, body.parameters, list(wanted))
    return JsonInference(request, frozenset(name for name in request.outputs if wanted.get(name, is_binary)))


def write_inference(asked: JsonInference, answer: Generated) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON if bytes come after it."""
    request, raws, outputs = asked.request, [], []
    values = {TEXT_OUTPUT: answer.texts, FINISH_REASON: answer.ends}
    for name in request.outputs:
        output: dict[str, Any] = {"name": name, "datatype": BYTES, "shape": request.shape}
        if name in asked.binary:
            raws.append(write_texts(values[name]))
            output["parameters"] = {_SIZE: len(raws[-1])}
        else:
            output["data"] = values[name]
        outputs.append(output)
    body = {"model_name": request.model, "model_version": request.version or DEFAULT_VERSION, "outputs": outputs}
    encoded = msgspec.json.encode({"id": request.id} | body if request.id else body)
    return (encoded + b"".join(raws), len(encoded)) if raws else (encoded, None)


def _json_length(headers: Mapping[bytes, bytes], num_bytes: int) -> int:
    told = headers.get(HEADER_LENGTH)
    if told is None:
        return num_bytes
    if not told.isdigit() or len(told) > 12 or int(told) > num_bytes:
        name = HEADER_LENGTH.decode()
        raise InvalidRequest(f"{name} is not a length within the body, which has {num_bytes} bytes", param=name)
    return int(told)


def _binary_tensor(one: _Input, size: object, content: bytes, at: int) -> tuple[Tensor, int]:
    name = shown(one.name)
    if one.data is not msgspec.UNSET:
        raise InvalidRequest(f"{name} has data, and {_SIZE} besides", param=name)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(content) - at:
        said = f"{name}: {_SIZE} is not a number of bytes that come after the JSON, {len(content) - at}"
        raise InvalidRequest(said, param=name)
    return raw_tensor(one.name, one.datatype, one.shape, content[at : at + size]), at + size


def _is_binary(output: _Output, default: bool) -> bool:
    found = output.parameters.pop(_BINARY, default)
    _refuse_others(output.name, output.parameters)
    if not isinstance(found, bool):
        raise InvalidRequest(f"{_BINARY} of {shown(output.name)} is to be true or false", param=_BINARY)
    return found


def _refuse_others(name: str, parameters: Mapping[str, object]) -> None:
    for other in parameters:
        raise UnsupportedParameter(f"{shown(name)}: its parameter '{shown(other)}' is not known", param=shown(other))
