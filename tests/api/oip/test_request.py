"""Requests of the protocol as completions."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.oip.answer import CompletionReader, Refusal, read_refusal, read_whole
from penstock.api.oip.infer_json import HEADER_LENGTH, read_inference
from penstock.api.oip.metadata import INPUTS
from penstock.api.oip.request import OWN, PARAMETERS, from_generate
from penstock.api.openai import parse_completion
from penstock.core.errors import EngineFailed, InvalidRequest


def _generate(**members: Any) -> dict[str, Any]:
    request = from_generate("m", "", json.dumps({"text_input": "x"} | members).encode())
    return dict(json.loads(request.completion(streams=False)))


def test_every_parameter_is_a_field_of_completions() -> None:
    samples: dict[str, Any] = {"INT32": 3, "INT64": 3, "FP32": 0.5, "BOOL": True, "BYTES": "[a]"}
    lists = {
        "stop": ["a"],
        "guided_choice": ["a", "b"],
        "guided_json": '{"type": "object"}',
        "guided_grammar": 'root ::= "a"',
    }
    for name, datatype in PARAMETERS.items():
        body = _generate(**{"max_tokens": 9, name: lists.get(name, samples[datatype])})
        parse_completion(json.dumps(body).encode())
        assert name in body
    assert {one.name for one in INPUTS} == {"text_input", *PARAMETERS, *OWN}


def test_version_of_a_model_is_named_as_gateways_do() -> None:
    def model(version: str) -> str:
        request = from_generate("m", version, b'{"text_input":"x"}')
        return str(json.loads(request.completion(streams=True))["model"])

    assert [model(""), model("1"), model("v2")] == ["m", "m", "m@v2"]


@given(st.binary(max_size=60))
def test_bodies_of_generate_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        from_generate("m", "1", body)


_parts = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["text_input", "max_tokens", "stop", "x"]),
        "datatype": st.sampled_from(["BYTES", "INT32", "?"]),
        "shape": st.lists(st.integers(-2, 3), max_size=3),
    },
    optional={
        "data": st.lists(st.text(max_size=2) | st.integers(), max_size=3),
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size", "y"]), st.integers(-1, 12), max_size=1),
    },
)


@given(st.lists(_parts, max_size=3), st.binary(max_size=24), st.integers(-4, 300) | st.none())
def test_tensors_with_binary_data_are_read_or_refused(parts: list[Any], raw: bytes, length: int | None) -> None:
    encoded = json.dumps({"inputs": parts}).encode()
    headers = {} if length is None else {HEADER_LENGTH: str(length if length > 30 else len(encoded)).encode()}
    with contextlib.suppress(InvalidRequest):
        assert read_inference("m", "1", headers, encoded + raw).request.texts


def test_binary_data_and_lists_stand_side_by_side() -> None:
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 7}},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [4]},
        {"name": "seed", "datatype": "INT64", "shape": [1], "parameters": {"binary_data_size": 8}},
    ]
    encoded = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    body = encoded + struct.pack("<I3sq", 3, b"fox", 7)
    found = read_inference("m", "1", {HEADER_LENGTH: b"%d" % len(encoded)}, body)
    assert found.request.texts == ["fox"]
    assert found.request.fields == {"max_tokens": 4, "seed": 7}
    assert found.binary == {"text_output", "finish_reason"}


def _event(**members: Any) -> bytes:
    return b"data: %b\r\n\r\n" % json.dumps(members).encode()


@given(st.integers(1, 40))
def test_stream_is_read_however_its_bytes_come(size: int) -> None:
    choices = [{"text": "a", "index": 0}, {"text": "bü", "index": 0}, {"text": "", "finish_reason": "stop"}]
    stream = b": comment\n\n" + b"".join(_event(choices=[choice]) for choice in choices) + b"data: [DONE]\n\n"
    reader = CompletionReader()
    assert "".join(reader.read(stream[at : at + size]) for at in range(0, len(stream), size)) == "abü"
    assert reader.end() == "stop"


def test_stream_that_breaks_off_or_tells_an_error_is_no_answer() -> None:
    reader = CompletionReader()
    reader.read(_event(choices=[{"text": "a"}]))
    with pytest.raises(EngineFailed):
        reader.end()
    with pytest.raises(Refusal, match="it broke") as told:
        reader.read(_event(error={"message": "it broke", "code": "engine_failed"}))
    assert told.value.code == "engine_failed"
    with pytest.raises(EngineFailed):
        reader.read(b"data: nonsense\n")


def test_whole_answers_have_a_choice_for_each_text() -> None:
    body = json.dumps({"choices": [{"text": "b", "index": 1, "finish_reason": "stop"}, {"text": "a", "index": 0}]})
    assert read_whole(body.encode(), 2).texts == ["a", "b"]
    for wrong in (b"{}", b"x", b'{"choices":[{"index":3}]}'):
        with pytest.raises(EngineFailed):
            read_whole(wrong, 1)


def test_refusals_of_others_keep_their_status_and_what_can_be_read() -> None:
    body = b'{"error":{"message":"full","code":503,"reason":"queue"}}'
    told = read_refusal(503, {b"retry-after": b"7", b"x-request-id": b"r"}, body)
    assert (told.status, told.message, told.code, told.reason, told.retry_after_s) == (503, "full", "503", "queue", 7)
    assert read_refusal(502, {}, b"<html>").message == "refused with status 502"
