"""The request of a model step whose model takes tensors, and the value that its answer is. Plain data: JSON of the Open
Inference Protocol, a batch of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from penstock.api.oip.tensor_call import CALL_BYTES, TensorCall, pack_call
from penstock.core.errors import StepFailed
from penstock.gateway.pipelines.graph import ModelStep, TensorInput
from penstock.gateway.pipelines.types import Labels, Text, as_text


def tensor_body(step: ModelStep, values: Mapping[str, Any]) -> bytes:
    """The request. Whether the values make tensors of these datatypes is for its replica to say."""
    inputs = [_tensor(name, step.tensors[name], value) for name, value in values.items()]
    body: dict[str, Any] = {"inputs": inputs}
    if step.parameters:
        body["parameters"] = step.parameters
    if step.tensor is not None:
        body["outputs"] = [{"name": step.tensor}]
    return pack_call(TensorCall(model=step.model), msgspec.json.encode(body))


def read_tensors(step: ModelStep, data: bytes) -> Any:
    """The plain value of the step, out of its replica's answer. Raises StepFailed."""
    end = data.find(b"\n", 0, CALL_BYTES)
    try:
        document = msgspec.json.decode(data[end + 1 :])
        found = {one["name"]: _nested(one["data"], one["shape"]) for one in document["outputs"]}
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, UnicodeDecodeError, RecursionError):
        raise StepFailed("its answer is not one with tensors", reason="wrong_result") from None
    if step.tensor is None:
        return found
    if step.tensor not in found:
        raise StepFailed(f"its answer has no tensor '{step.tensor}'", reason="wrong_result")
    value = found[step.tensor]
    if isinstance(step.output, Labels):
        return _label(value, step.output.names)
    if isinstance(step.output, Text):
        return _scalar(value)
    return value


def _tensor(name: str, told: TensorInput, value: Any) -> dict[str, Any]:
    if told.datatype == "BYTES":
        value = [as_text(one) for one in value] if isinstance(value, list | tuple) else as_text(value)
    shape = told.shape or (1, *(_lengths(value) or (1,)))
    return {"name": name, "datatype": told.datatype, "shape": shape, "data": tuple(_flat(value))}


def _lengths(value: Any) -> tuple[int, ...]:
    """Those of a list of lists, by its first elements; where others differ its replica refuses it."""
    if not isinstance(value, list | tuple):
        return ()
    return (len(value), *(_lengths(value[0]) if value else ()))


def _flat(value: Any) -> Iterator[Any]:
    if not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from _flat(one)


def _nested(data: list[Any], shape: list[int]) -> Any:
    """Flat data as the lists of its shape, without the batch of one. Raises ValueError."""
    for size in reversed(shape[1:]):
        if size <= 0 or len(data) % size:
            raise ValueError
        data = [data[at : at + size] for at in range(0, len(data), size)]
    if shape and shape[0] != 1:
        return data
    (only,) = data
    return only


def _label(value: Any, names: tuple[str, ...]) -> Any:
    """Returns the label by the scores of a row, or by the text that the model says."""
    said = _scalar(value)
    if isinstance(said, str):
        return said
    if not isinstance(value, list) or len(value) != len(names):
        count = len(value) if isinstance(value, list) else 1
        raise StepFailed(f"it answered {count} scores for {len(names)} labels", reason="wrong_result")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
        raise StepFailed("a score of its answer is no number", reason="wrong_result")
    scores = dict(zip(names, value, strict=True))
    return {"label": max(scores, key=scores.__getitem__), "scores": scores}


def _scalar(value: Any) -> Any:
    while isinstance(value, list) and len(value) == 1:
        (value,) = value
    return value
