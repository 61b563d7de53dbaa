"""Messages that nobody means well with: each is refused by name, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.core.errors import InvalidRequest
from penstock.oip.infer_messages import InferRequest, read_infer
from tests.oip.opened import Ports
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually

_CALL = "/inference.GRPCInferenceService/"


def _request(change: Callable[[Any], object]) -> service_pb2.ModelInferRequest:
    asked = service_pb2.ModelInferRequest(model_name=NAME)
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"the fox")
    change(asked)
    return asked


def _raw(asked: Any) -> None:
    asked.raw_input_contents.append(b"\1\0\0\0x")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_raw, "only one of them is read"),
        (lambda asked: (_raw(asked), _raw(asked)), "2 parts for 1 inputs"),
        (lambda asked: asked.inputs[0].shape.append(-5), "not negative"),
        (lambda asked: asked.inputs[0].shape.extend([2**62, 2**62]), "more than 2048 elements"),
        (lambda asked: asked.inputs[0].shape.extend([1] * 20), "more than 8 dimensions"),
        (lambda asked: asked.inputs[0].contents.int_contents.append(1), "stand in bytes_contents"),
        (lambda asked: setattr(asked.inputs[0], "datatype", "FP16"), "cannot be of the datatype"),
        (lambda asked: setattr(asked.inputs[0], "datatype", "x" * 9000), "cannot be of the datatype"),
        (lambda asked: asked.parameters["seed"], "has no value"),
        (lambda asked: asked.inputs[0].parameters["shared_memory_region"].SetInParent(), "shared_memory_region"),
        (lambda asked: asked.outputs.add(name="text_output").parameters["classification"], "classification"),
        (lambda asked: asked.parameters["x" * 70_000].SetInParent(), "no value"),
        (lambda asked: setattr(asked, "id", "x" * 2000), "id has more than"),
        (lambda asked: asked.inputs.add(name="max_tokens", datatype="INT32", shape=[0]), "0 elements"),
    ],
)
def test_malformed_request_is_refused_with_the_reason(change: Callable[[Any], object], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        read_infer(InferRequest.FromString(_request(change).SerializeToString()))
    assert len(refused.value.message) < 400


def test_bytes_that_are_no_message_are_an_invalid_argument(ports: Ports, replica: Replica) -> None:
    """As over HTTP: a client's nonsense is the client's fault."""
    dice = random.Random(7)
    good = _request(lambda asked: None).SerializeToString()
    wrong = [
        b"\xff\xff\xff",
        good[:-3],
        good.replace(b"text_input", b"text\xff\xfe\xfd\xfc\xfb\xfa"),
        b"\x0a\xff\xff\xff\xff\x0f",
    ]
    wrong += [dice.randbytes(dice.randrange(1, 60)) for _ in range(20)]
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        infer = channel.unary_unary(f"{_CALL}ModelInfer")
        for data in wrong:
            with pytest.raises(grpc.RpcError) as refused:
                infer(data, timeout=GIVE_UP_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, data
        answers = channel.stream_stream(f"{_CALL}ModelStreamInfer")(iter([*wrong, good]), timeout=GIVE_UP_S)
        told = [service_pb2.ModelStreamInferResponse.FromString(answer) for answer in answers]
        assert len(told) == len(wrong) + 1
        assert sum(not one.error_message for one in told) == 1
    eventually(replica.is_idle)


def test_headers_of_gateways_and_too_many_of_any_are_refused(ports: Ports) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        infer = channel.unary_unary(f"{_CALL}ModelInfer")
        good = _request(lambda asked: None).SerializeToString()
        for metadata, code in (
            ((("x-penstock", "envelope"),), grpc.StatusCode.INVALID_ARGUMENT),
            ((("x-any", "y" * 40_000),), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ((("origin", "https://evil.example"),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                infer(good, metadata=metadata, timeout=GIVE_UP_S)
            assert refused.value.code() is code
