import json
from typing import Any

import pytest

from penstock.api.openai import parse_chat
from penstock.api.openai.guided import MAX_CHARACTERS
from penstock.core.errors import InvalidRequest
from penstock.core.guide import Guide

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FROM_SCHEMA = Guide("json_schema", json.dumps(SCHEMA))


def asked(**body: Any) -> Any:
    messages = [{"role": "user", "content": "x"}]
    return parse_chat(json.dumps({"model": "m", "messages": messages, **body}).encode()).guide()


@pytest.mark.parametrize(
    ("body", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, Guide.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, Guide.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, FROM_SCHEMA),
        ({"response_format": {"type": "json", "value": SCHEMA}}, FROM_SCHEMA),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, FROM_SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "json_schema": None}}, FROM_SCHEMA),
        ({"response_format": {"type": "regex", "value": "a\\d"}}, Guide("regex", "a\\d")),
        ({"guided_json": SCHEMA}, FROM_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, FROM_SCHEMA),
        ({"guided_choice": ["a", "b"]}, Guide.choice(["a", "b"])),
        ({"structured_outputs": {"json": SCHEMA}}, FROM_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Guide.json_object()),
        ({"ebnf": 'root ::= "a"'}, Guide("grammar", 'root ::= "a"')),
    ],
)
def test_a_guide_is_what_was_asked_for_and_by_which_field(body: dict[str, Any], guide: Guide) -> None:
    found = asked(**body)
    assert found.guide == guide
    assert found.param == next(iter(body))


@pytest.mark.parametrize(
    "body",
    [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None}, {"regex": None}],
)
def test_who_asks_for_nothing_gets_no_guide(body: dict[str, Any]) -> None:
    assert asked(**body) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "text", "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "regex", "value": "a", "grammar": "b"}}, "response_format.grammar"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": {"enum": ["x" * MAX_CHARACTERS]}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * (MAX_CHARACTERS + 1)}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**body)
    assert caught.value.param == param
