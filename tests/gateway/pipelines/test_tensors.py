"""What a step asks a model of tensors, and what it makes of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.oip.tensor_call import open_call
from penstock.core.errors import StepFailed
from penstock.gateway.pipelines.calls import call_of
from penstock.gateway.pipelines.graph import ModelStep
from penstock.gateway.pipelines.tensors import read_tensors, tensor_body
from tests.gateway.pipelines.written import problem_of, written

HEAD = "name: p\nsteps:\n  row: {value: [1, 2.5], output: vector}\n  words: {value: [a, b], output: {list: text}}\n"
INPUT = {"text": "Why?", "messages": [], "metadata": {}}


def step_of(directory: Path, said: str) -> ModelStep:
    step = written(directory, f"{HEAD}  it: {{model: m, task: tensors, {said}}}").root.steps[-1]
    assert isinstance(step, ModelStep)
    return step


def answer(**tensors: tuple[list[int], list[Any]]) -> bytes:
    outputs = [
        {"name": name, "datatype": "FP32", "shape": shape, "data": data} for name, (shape, data) in tensors.items()
    ]
    return b'{"json_length":null}\n' + msgspec.json.encode({"model_name": "m", "outputs": outputs})


@pytest.mark.parametrize(
    ("said", "datatype", "shape", "data"),
    [
        ("value: input.text", "BYTES", [1, 1], ["Why?"]),
        ("value: input.text, shape: [1]", "BYTES", [1], ["Why?"]),
        ("value: words", "BYTES", [1, 2], ["a", "b"]),
        ("value: words, shape: [2, 1]", "BYTES", [2, 1], ["a", "b"]),
        ("value: row, datatype: FP32", "FP32", [1, 2], [1, 2.5]),
        ("value: input.metadata.rows, datatype: FP64", "FP64", [1, 2, 3], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_value_is_a_batch_of_one(tmp_path: Path, said: str, datatype: str, shape: list[int], data: list[Any]) -> None:
    step = step_of(tmp_path, f"inputs: {{x: {{{said}}}}}, parameters: {{priority: 1}}, tensor: y, output: vector")
    values = {"input": INPUT | {"metadata": {"rows": [[1, 2, 3], [4, 5, 6]]}}, "row": [1, 2.5], "words": ["a", "b"]}
    call, body = open_call(tensor_body(step, call_of(step, values, is_answer=False).arguments))
    assert (call.model, call.call, call.json_length) == ("m", "infer", None)
    assert msgspec.json.decode(body) == {
        "inputs": [{"name": "x", "datatype": datatype, "shape": shape, "data": data}],
        "outputs": [{"name": "y"}],
        "parameters": {"priority": 1},
    }


@pytest.mark.parametrize(
    ("said", "tensors", "value"),
    [
        ("", {"a": ([1, 2], [1, 2]), "b": ([1], [3])}, {"a": [1, 2], "b": 3}),
        ("tensor: a", {"a": ([1, 2, 2], [1, 2, 3, 4])}, [[1, 2], [3, 4]]),
        ("tensor: a, output: vector", {"a": ([1, 2], [1, 2])}, [1, 2]),
        ("tensor: a, output: text", {"a": ([1, 1], ["yes"])}, "yes"),
        (
            "tensor: a, output: {labels: [de, en]}",
            {"a": ([1, 2], [0.25, 0.75])},
            {"label": "en", "scores": {"de": 0.25, "en": 0.75}},
        ),
        ("tensor: a, output: {labels: [de, en]}", {"a": ([1, 1], ["de"])}, "de"),
        ("tensor: a", {"a": ([2, 1], [1, 2])}, [[1], [2]]),
    ],
)
def test_an_answer_is_the_value_that_its_step_declares(
    tmp_path: Path, said: str, tensors: dict[str, Any], value: Any
) -> None:
    step = step_of(tmp_path, f"inputs: {{x: {{value: input.text}}}}, {said}")
    assert read_tensors(step, answer(**tensors)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n{}",
        b"{}\n[1]",
        b'{}\n{"outputs": [{"name": "a"}]}',
        answer(b=([1, 2], [1, 2])),
        answer(a=([1, 3], [1, 2, 3])),
        answer(a=([1, 2], [1, None])),
        answer(a=([1, 2], [1, 2, 3])),
        answer(a=([1, 0], [])),
        answer(a=([1, -2], [1, 2])),
        answer(a=([1], [])),
        b"{}\n" + b"[" * 100_000,
    ],
)
def test_an_answer_that_is_none_is_told(tmp_path: Path, data: bytes) -> None:
    step = step_of(tmp_path, "inputs: {x: {value: input.text}}, tensor: a, output: {labels: [de, en]}")
    with pytest.raises(StepFailed) as failed:
        read_tensors(step, data)
    assert failed.value.reason == "wrong_result"


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("tensor: x", "tensors needs inputs"),
        ("text: input.text", "'text' is not for tensors"),
        ("inputs: {x: {value: row}}", "edge 'row' is vector, and the datatype of tensor 'x' is BYTES"),
        (
            "inputs: {x: {value: input.text, datatype: FP32}}",
            "edge 'input.text' is text, and the datatype of tensor 'x' is FP32",
        ),
        ("inputs: {x: {value: input.text, datatype: FP16}}", "Invalid enum value 'FP16'"),
        ("inputs: {x: {value: nobody}}", "edge 'nobody': nothing before it is called 'nobody'"),
        (
            "inputs: {x: {value: input.text}}, output: vector",
            "'tensor' says which of the model's outputs is the vector",
        ),
        ("inputs: {x: {value: input.text}}, tensor: a, output: labels", "a tensor has no names for labels"),
        ("inputs: {x: {value: input.text}}, prompt: x", "'prompt' is not for tensors"),
    ],
)
def test_what_is_wrong_is_told_before_it_is_served(tmp_path: Path, said: str, problem: str) -> None:
    found = problem_of(tmp_path, f"{HEAD}  it: {{model: m, task: tensors, {said}}}")
    assert problem in found
    assert found.startswith("5: ")
