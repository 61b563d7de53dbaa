"""Messages that nobody means well with: each is refused by name, and nothing is left behind."""

from __future__ import annotations

import contextlib
import http.client
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from penstock.core.errors import InvalidRequest
from penstock.oip.infer_messages import InferRequest, read_infer
from penstock.oip.messages import FILE
from penstock.oip.over_grpc import _infer_message
from tests.loop_pauses import without_pauses
from tests.oip.opened import MAX_BODY_BYTES, Ports
from tests.server.replica import NAME, Replica
from tests.waiting import GIVE_UP_S, eventually

_CALL = "/inference.GRPCInferenceService/"


def _request(
    change: Callable[[Any], object] = lambda asked: None, text: bytes = b"the fox"
) -> service_pb2.ModelInferRequest:
    asked = service_pb2.ModelInferRequest(model_name=NAME)
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text)
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
    good = _request().SerializeToString()
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


def _tag(number: int, content: bytes) -> bytes:
    """A field with a length, which here has up to 2**28 bytes."""
    size = len(content)
    return bytes([number << 3 | 2]) + bytes([size >> s & 0x7F | 0x80 for s in (0, 7, 14)] + [size >> 21]) + content


def _many(room: int) -> dict[str, bytes]:
    """Messages of so many bytes that would become many times as large."""
    return {
        "inputs without anything": b"\x2a\0" * (room // 2),
        "parameters without anything": b"\x22\0" * (room // 2),
        "parameters of a tensor": _tag(5, b"\x22\0" * (room // 2)),
        "raw contents": b"\x3a\0" * (room // 2),
        "dimensions": _tag(5, _tag(3, b"\1" * room)),
        "numbers": _tag(5, _tag(5, _tag(2, b"\1" * room))),
        "texts": _tag(5, _tag(5, b"\x42\0" * (room // 2))),
    }


def _bodies(room: int) -> list[tuple[str, bytes]]:
    """The same over HTTP."""

    def full(before: bytes, unit: bytes, after: bytes) -> bytes:
        return before + b",".join([unit] * ((room - len(before) - len(after)) // (len(unit) + 1))) + after

    tensor = b'{"inputs":[{"name":"text_input","datatype":"BYTES",'
    return [
        ("generate", full(b"{", b'"a":1', b"}")),
        ("generate", full(b'{"text_input":"x","parameters":{"stop":[', b'"a"', b"]}}")),
        ("generate", full(b'{"text_input":"x","sampling_parameters":"[', b"[]", b']"}')),
        ("infer", full(tensor + b'"data":["x"],"shape":[', b"1", b"]}]}")),
        ("infer", full(tensor + b'"shape":[1],"data":[', b"[]", b"]}]}")),
        ("infer", full(b'{"inputs":[', b"{}", b"]}")),
    ]


@pytest.mark.parametrize("name", _many(0))
def test_message_that_would_become_many_times_as_large_is_not_read(name: str) -> None:
    data = _many(1 << 18)[name]
    assert not FILE.has_few_fields("ModelInferRequest", data)
    with pytest.raises(InvalidRequest, match="more than 8192 fields"):
        _infer_message(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_counted_or_left_to_be_refused(data: bytes) -> None:
    assert FILE.has_few_fields("ModelInferRequest", data)


@pytest.mark.slow
def test_large_requests_do_not_stop_the_loop(ports: Ports, replica: Replica) -> None:
    room = MAX_BODY_BYTES - 1000
    texts = [b"x" * room, b"\1" * (room // 2), "€".encode() * (room // 4)]
    messages = [*_many(room).values(), *(_request(text=text).SerializeToString() for text in texts)]
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        infer = channel.unary_unary(f"{_CALL}ModelInfer")

        def ask(data: bytes) -> grpc.StatusCode:
            with pytest.raises(grpc.RpcError) as refused:
                infer(data, timeout=GIVE_UP_S)
            return refused.value.code()

        for data in messages:
            assert without_pauses(replica.loop, partial(ask, data)) is grpc.StatusCode.INVALID_ARGUMENT
    for call, body in _bodies(room):
        assert without_pauses(replica.loop, partial(post, ports, f"/v2/models/{NAME}/{call}", body)) == 400


def post(ports: Ports, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=GIVE_UP_S)
    with contextlib.closing(connection):
        connection.request("POST", path, body)
        return connection.getresponse().status


def test_headers_of_gateways_and_too_many_of_any_are_refused(ports: Ports) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        infer = channel.unary_unary(f"{_CALL}ModelInfer")
        good = _request().SerializeToString()
        for metadata, code in (
            ((("x-penstock", "envelope"),), grpc.StatusCode.INVALID_ARGUMENT),
            ((("x-any", "y" * 40_000),), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ((("origin", "https://evil.example"),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                infer(good, metadata=metadata, timeout=GIVE_UP_S)
            assert refused.value.code() is code
