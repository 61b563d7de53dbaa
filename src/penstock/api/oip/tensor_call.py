"""Calls about models that take tensors as gateways send them to replicas: a line that says what is asked, and after it
the body that a client has sent. So a gateway reads the line alone, however large the tensors are.

    {"model": "classifier", "version": "2", "call": "infer", "json_length": 130}
    {"inputs": …} and raw bytes
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from penstock.api.decoding import WireStruct, decode
from penstock.core.errors import InvalidRequest

TENSORS_PATH = "/v1/penstock/tensors"
CALL_BYTES = 4096  # of the line


class TensorCall(WireStruct):
    model: str
    version: str = ""
    call: Literal["infer", "metadata", "config", "statistics"] = "infer"
    json_length: Annotated[int, Meta(ge=0)] | None = None


class Packed(NamedTuple):
    call: TensorCall
    body: bytes


_decoder = msgspec.json.Decoder(TensorCall)


def pack_call(call: TensorCall, body: bytes) -> bytes:
    return b"%b\n%b" % (msgspec.json.encode(call), body)


def open_call(data: bytes) -> Packed:
    """Raises InvalidRequest."""
    end = data.find(b"\n", 0, CALL_BYTES)
    if end < 0:
        raise InvalidRequest("a call about tensors begins with a line of JSON")
    return Packed(decode(_decoder, data[:end]), data[end + 1 :])
