"""`infer` over gRPC for models that take tensors: a message becomes the body that HTTP would have, and back. Raw bytes
are passed on as they are; nobody looks at a value."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from penstock.core.config import shown
from penstock.core.errors import EngineFailed, InvalidRequest
from penstock.oip.infer_messages import (
    FINAL,
    InferResponse,
    StreamResponse,
    contents_field,
    read_parameters,
    refuse_parameters,
)
from penstock.oip.tensor_calls import TensorBody
from penstock.rpc.messages import Message

_BYTES = "BYTES"


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int]


class _Answer(msgspec.Struct):
    model_name: str
    model_version: str
    outputs: list[_Output]
    id: str = ""


_answer = msgspec.json.Decoder(_Answer)


def infer_body(message: Message) -> TensorBody:
    """Raises InvalidRequest."""
    raws, inputs = list(message.raw_input_contents), message.inputs
    if raws and len(raws) != len(inputs):
        said = f"raw_input_contents has {len(raws)} parts for {len(inputs)} inputs"
        raise InvalidRequest(said, param="raw_input_contents")
    heads, parts = [], []
    for number, one in enumerate(inputs):
        refuse_parameters(one)
        head: dict[str, Any] = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        values = _contents(one, has_raw=bool(raws))
        raw = raws[number] if raws else _packed(values) if one.datatype == _BYTES else None
        if raw is None:
            head["data"] = values
        else:
            head["parameters"] = {"binary_data_size": len(raw)}
            parts.append(raw)
        heads.append(head)
    body = {
        "inputs": heads,
        "id": message.id,
        "parameters": read_parameters(message) | {"binary_data_output": True},
        "outputs": [
            {"name": one.name, "parameters": read_parameters(one) | {"binary_data": True}} for one in message.outputs
        ],
    }
    encoded = msgspec.json.encode(body)
    return TensorBody(b"".join([encoded, *parts]), len(encoded))


def infer_response(body: TensorBody) -> Message:
    """Raises EngineFailed for an answer that is none."""
    length = len(body.data) if body.json_length is None else body.json_length
    try:
        head = _answer.decode(body.data[:length])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineFailed("the replica's answer is not one with tensors") from None
    response = InferResponse(model_name=head.model_name, model_version=head.model_version, id=head.id)
    at = length
    for one in head.outputs:
        response.outputs.add(name=one.name, datatype=one.datatype, shape=one.shape)
        size = one.parameters.get("binary_data_size", 0)
        response.raw_output_contents.append(body.data[at : at + size])
        at += size
    return response


def infer_piece(body: TensorBody) -> Message:
    """The whole answer to one request of a stream."""
    response = infer_response(body)
    response.parameters[FINAL].bool_param = True
    return StreamResponse(infer_response=response)


def _contents(one: Message, *, has_raw: bool) -> list[Any]:
    given = [field.name for field, _ in one.contents.ListFields()]
    if has_raw:
        if given:
            said = f"{shown(one.name)} has contents, and the request has raw_input_contents: only one of them is read"
            raise InvalidRequest(said, param=shown(one.name))
        return []
    return list(getattr(one.contents, contents_field(one, given)))


def _packed(texts: list[bytes]) -> bytes:
    return b"".join([b"%b%b" % (struct.pack("<I", len(one)), one) for one in texts])
