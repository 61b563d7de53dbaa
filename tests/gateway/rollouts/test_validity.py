"""Guided output and tool calls against what their requests asked for."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.rollout import Metric
from penstock.gateway.rollouts.answers import Answer, Call
from penstock.gateway.rollouts.json_schema import TooMuchWork, accepts
from penstock.gateway.rollouts.validity import Asked

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]}


def faults(body: Any, answer: Answer) -> dict[Metric, float]:
    return dict(Asked(body if isinstance(body, bytes) else json.dumps(body).encode()).faults(answer))


@pytest.mark.parametrize(
    ("body", "text", "is_wrong"),
    [
        (GUIDED, '{"a": 1}', False),
        (GUIDED, '{"a": "1"}', True),
        (GUIDED, '{"a": 1, "b": 2}', True),
        (GUIDED, "so: {}", True),
        ({"response_format": {"type": "json_object"}}, "{}", False),
        ({"response_format": {"type": "json_object"}}, "[]", True),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", False),
        ({"guided_choice": ["yes", "no"]}, "maybe", True),
        ({"guided_json": json.dumps(SCHEMA)}, '{"a": 1}', False),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"a": 1.5}', True),
    ],
)
def test_guided_output_is_checked(body: Any, text: str, is_wrong: bool) -> None:
    assert faults(body, Answer(text)) == {Metric.INVALID_GUIDED: float(is_wrong)}


@pytest.mark.parametrize(
    ("call", "is_wrong"),
    [
        (Call("look", '{"a": 1}'), False),
        (Call("look", '{"a": 1'), True),
        (Call("look", '{"a": null}'), True),
        (Call("jump", '{"a": 1}'), True),
    ],
)
def test_tool_calls_are_checked(call: Call, is_wrong: bool) -> None:
    assert faults(TOOLS, Answer("", (call,))) == {Metric.INVALID_TOOLS: float(is_wrong)}
    anthropic = {"tools": [{"name": "look", "input_schema": SCHEMA}]}
    assert faults(anthropic, Answer("", (call,))) == {Metric.INVALID_TOOLS: float(is_wrong)}


def test_a_tool_that_had_to_be_called_and_was_not_is_a_fault() -> None:
    assert faults(TOOLS | {"tool_choice": "required"}, Answer("no")) == {Metric.INVALID_TOOLS: 1.0}
    named = {"type": "function", "function": {"name": "look"}}
    assert faults(TOOLS | {"tool_choice": named}, Answer("no")) == {Metric.INVALID_TOOLS: 1.0}
    assert faults(TOOLS, Answer("no")) == {}


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (GUIDED, Answer('{"a": ', (), True)),  # its limit of tokens cut it off
        (b"not JSON", Answer("x")),
        ({"response_format": 3}, Answer("x")),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://x"}}}}, Answer("{}")),
        ({"tools": [3]}, Answer("", (Call("look", "{}"),))),
        ({"structured_outputs": {"grammar": "x"}}, Answer("y")),
    ],
)
def test_nothing_is_said_where_nothing_can_be_told(body: Any, answer: Answer) -> None:
    assert faults(body, answer) == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"type": "array"}] * 30_000},
        {"type": "nothing"},
        {"items": 3},
    ],
)
def test_a_hostile_schema_is_given_up_soon(schema: Any) -> None:
    with pytest.raises(TooMuchWork):
        accepts(schema, [1])


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(-2, 2) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
_TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
_SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({}, optional={"type": _TYPES | st.lists(_TYPES, min_size=1, max_size=2, unique=True)})
    | st.fixed_dictionaries({"enum": st.lists(_VALUES, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"minimum": st.integers(-1, 3), "exclusiveMaximum": st.integers(2, 8)})
    | st.fixed_dictionaries({"minLength": st.integers(0, 2), "maxLength": st.integers(1, 3)})
    | st.fixed_dictionaries({"minItems": st.integers(0, 2), "maxProperties": st.integers(0, 2)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(_SCHEMAS, _VALUES)
def test_it_agrees_with_a_whole_validator_in_what_it_knows(schema: Any, value: Any) -> None:
    assert accepts(schema, value) is jsonschema.Draft202012Validator(schema).is_valid(value)
