"""`infer` over gRPC: from a ModelInferRequest to a request, and from an answer to a ModelInferResponse."""

from __future__ import annotations

from typing import Any

from penstock.api.oip.answer import Generated, Refusal
from penstock.api.oip.request import (
    DEFAULT_VERSION,
    FINISH_REASON,
    TEXT_OUTPUT,
    InferenceRequest,
    from_tensors,
)
from penstock.api.oip.tensors import BYTES, Tensor, listed_tensor, raw_tensor, write_texts
from penstock.core.config import shown
from penstock.core.errors import InvalidRequest, UnsupportedParameter
from penstock.oip.messages import FILE
from penstock.rpc.messages import Message

InferRequest, InferResponse = FILE["ModelInferRequest"], FILE["ModelInferResponse"]
StreamResponse = FILE["ModelStreamInferResponse"]

FINAL = "triton_final_response"
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def read_infer(message: Message) -> InferenceRequest:
    """Raises InvalidRequest."""
    raws, inputs = message.raw_input_contents, message.inputs
    if raws and len(raws) != len(inputs):
        said = f"raw_input_contents has {len(raws)} parts for {len(inputs)} inputs"
        raise InvalidRequest(said, param="raw_input_contents")
    tensors = [_tensor(one, raws[number] if raws else None) for number, one in enumerate(inputs)]
    parameters = read_parameters(message)
    for one in message.outputs:
        refuse_parameters(one)
    outputs = [one.name for one in message.outputs]
    return from_tensors(message.model_name, message.model_version, message.id, tensors, parameters, outputs)


def write_infer(asked: InferenceRequest, answer: Generated) -> Message:
    response = InferResponse(model_name=asked.model, model_version=asked.version or DEFAULT_VERSION, id=asked.id)
    values = {TEXT_OUTPUT: answer.texts, FINISH_REASON: answer.ends}
    for name in asked.outputs:
        response.outputs.add(name=name, datatype=BYTES, shape=asked.shape)
        response.raw_output_contents.append(write_texts(values[name]))
    return response


def write_piece(asked: InferenceRequest, piece: Generated) -> Message:
    """Part of an answer on a stream of requests."""
    response = write_infer(asked, piece)
    response.parameters[FINAL].bool_param = piece.is_last
    return StreamResponse(infer_response=response)


def write_failure(message: Message, refusal: Refusal) -> Message:
    """The end of one request on a stream, which goes on. tritonclient shows the text alone, so the id is in it, too."""
    said = f"[request id: {message.id}] {refusal.message}" if message.id else refusal.message
    response = StreamResponse(error_message=said)
    inner = response.infer_response
    inner.id, inner.model_name, inner.model_version = message.id, message.model_name, message.model_version
    inner.parameters[FINAL].bool_param = True
    for name, value in (("code", refusal.code), ("param", refusal.param), ("reason", refusal.reason)):
        if value:
            inner.parameters[name].string_param = value
    if refusal.retry_after_s is not None:
        inner.parameters["retry_after"].int64_param = refusal.retry_after_s
    return response


def _tensor(one: Message, raw: bytes | None) -> Tensor:
    refuse_parameters(one)
    name, datatype, contents = one.name, one.datatype, one.contents
    given = [field.name for field, _ in contents.ListFields()]
    if raw is not None:
        if given:
            said = f"{shown(name)} has contents, and the request has raw_input_contents: only one of them is read"
            raise InvalidRequest(said, param=shown(name))
        return raw_tensor(name, datatype, one.shape, raw)
    return listed_tensor(name, datatype, one.shape, list(getattr(contents, contents_field(one, given))))


def contents_field(one: Message, given: list[str]) -> str:
    """The field of a tensor's contents that its datatype's values stand in. `given`: fields that are there."""
    field = _CONTENTS.get(one.datatype)
    if field is None:
        raise InvalidRequest(
            f"{shown(one.name)}: contents cannot be of the datatype '{shown(one.datatype)}'", param=shown(one.name)
        )
    if given not in ([], [field]):
        said = f"{shown(one.name)}: values of {shown(one.datatype)} stand in {field}, not in {', '.join(given)}"
        raise InvalidRequest(said, param=shown(one.name))
    return field


def read_parameters(message: Message) -> dict[str, Any]:
    return {name: _parameter(name, value) for name, value in message.parameters.items()}


def _parameter(name: str, value: Message) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest(f"the parameter '{shown(name)}' has no value", param=shown(name))
    return getattr(value, kind)


def refuse_parameters(tensor: Message) -> None:
    for name in tensor.parameters:
        said = f"{shown(tensor.name)}: its parameter '{shown(name)}' is not known"
        raise UnsupportedParameter(said, param=shown(name))
