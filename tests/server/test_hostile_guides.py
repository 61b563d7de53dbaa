"""Guides that nobody sends in earnest: each is refused or followed, never a failure of the server, and it serves on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.server.replica import Replica

REPEATS = st.sampled_from(["{0}", "{500}", "{0,300}", "{3,}", "{100000}", "{4294967296}", "*", "+", "?", "*?", "{2,1}"])
ATOMS = st.sampled_from(
    [
        "a",
        ".",
        "\\",
        "\\d",
        "\\pL",
        "[^a]",
        "[]",
        "^",
        "$",
        "\\b",
        "(?i)",
        "(?-u:\\xff)",
        "/",
        '"',
        "é",
        "\x00",
        "\n",
        "",
    ]
)


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(parts, REPEATS).map("".join),
        st.lists(parts, min_size=1, max_size=4).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda found: f"(?:{'|'.join(found)})"),
        parts.map(lambda part: f"({part})"),
    )


REGEXES = st.one_of(st.recursive(ATOMS, joined, max_leaves=12), st.text(min_size=1, max_size=20)).filter(bool)

TERMS = st.one_of(
    st.sampled_from(
        ["start", "r", "missing", '""', '"a"', '"a\\xff"', "/a?/", "//", "<s>", "%json {}", '"x"{100000}', ""]
    ),
    REGEXES.map(lambda regex: f"/{regex}/"),
)
RULES = st.lists(st.tuples(TERMS, TERMS).map(" ".join), min_size=1, max_size=3).map(" | ".join)
GRAMMARS = st.one_of(
    st.tuples(RULES, RULES).map(lambda rules: f"start: {rules[0]}\nr: {rules[1]}"),
    RULES.map(lambda rule: f"root ::= {rule}"),
    st.text(min_size=1, max_size=20),
)

LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            True,
            False,
            {},
            {"$ref": "#"},
            {"$ref": "#/properties/a"},
            {"$ref": "http://example.com"},
            {"type": "string", "minLength": 100_000},
            {"type": "string", "maxLength": 3, "minLength": 4},
            {"type": "integer", "minimum": 5, "maximum": 4},
            {"type": "number", "multipleOf": 1e-300},
            {"type": "integer", "minimum": -(10**400)},
            {"enum": []},
            {"enum": ["\x00", 1e308, None]},
            {"type": "what"},
            {"x-guidance": {"whitespace_pattern": "("}},
        ]
    ),
    REGEXES.map(lambda regex: {"type": "string", "pattern": regex}),
)
COUNTS = st.sampled_from([0, 1, 3, 70_000, 2**63])


def nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least}, parts, COUNTS),
        st.builds(
            lambda one, least: {"properties": {"a": one}, "required": ["a"], "minProperties": least}, parts, COUNTS
        ),
        st.builds(
            lambda key, all_: {key: all_}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(parts, max_size=3)
        ),
        parts.map(lambda one: {"not": one}),
    )


SCHEMAS = st.recursive(LEAVES, nested, max_leaves=6)
GUIDES = st.one_of(
    REGEXES.map(lambda source: {"guided_regex": source}),
    GRAMMARS.map(lambda source: {"guided_grammar": source}),
    SCHEMAS.map(lambda source: {"guided_json": source}),
)


@pytest.mark.slow
@given(guide=GUIDES, is_stream=st.booleans(), seed=st.integers(0, 9))
@example(guide={"guided_regex": "\\"}, is_stream=False, seed=0)
@example(guide={"guided_grammar": 'start: /[a-z]{8}/ "x"{100000}'}, is_stream=True, seed=1)
@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
def test_no_guide_is_a_failure_of_the_server(
    guided_replica: Replica, guide: dict[str, Any], is_stream: bool, seed: int
) -> None:
    body = {"prompt": "It is", "max_tokens": 24, "seed": seed, "stream": is_stream}
    status, _, answer = guided_replica.post("/v1/completions", **body, **guide)
    assert status in (200, 400), (guide, answer)
    if status == 400:
        error = answer["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", next(iter(guide))), guide
    elif is_stream:
        events = [json.loads(data) for data in answer.removesuffix(b"data: [DONE]\n\n").split(b"data: ")[1:]]
        assert all(
            event.get("error", {}).get("type", "invalid_request_error") == "invalid_request_error" for event in events
        )
    status, _, answer = guided_replica.post("/v1/completions", prompt="It is", max_tokens=24, guided_choice=["yes"])
    assert (status, answer["choices"][0]["text"]) == (200, "yes")
    assert len(guided_replica.processes) == 1, "the engine was started again"
