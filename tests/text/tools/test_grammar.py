"""What a guide of calls lets through: walked at random, every answer is calls that can be made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from penstock.core.errors import InvalidRequest
from penstock.core.guide import Guide
from penstock.text.detokenizer import Detokenizer
from penstock.text.grammars import Matcher
from penstock.text.tools import FORMATS, CallArguments, CallBegun, CallEnded, Tool
from penstock.text.tools.grammar import Shape, literal
from penstock.text.tools.parser import Syntax
from tests.text.tools.reading import read, told
from tests.text.walking import Walker, allowed, tokenizer, vocabulary

pytestmark = pytest.mark.slow

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "where": {"type": "object", "properties": {"lat": {"type": "boolean"}}},
    },
    "required": ["city", "unit"],
}
TOOLS = [
    Tool("get_weather", WEATHER),
    Tool("f"),
    Tool("g", {"type": "object", "properties": {"a": {"type": "boolean"}}}),
]
BY_NAME = {tool.name: tool for tool in TOOLS}


READ = sorted(name for name, known in FORMATS.items() if not known.is_alone)  # from text, by `CallParser`


def guide(name: str, tools: list[Tool] = TOOLS, **options: Any) -> Guide:
    found = FORMATS[name].guide(tools, {}, **{"is_required": True} | options)
    assert found is not None
    return found


def accepts(guide: Guide, text: str) -> bool:
    matcher = Matcher(vocabulary(), guide)
    return matcher.take(tokenizer().encode(text, add_special_tokens=False)) and 2 in allowed(matcher.mask())


@pytest.mark.parametrize("name", READ)
def test_whoever_must_call_makes_calls_that_follow_their_schemas(name: str) -> None:
    num_calls = 0
    for seed in range(12):
        if (text := Walker(seed).walk(Matcher(vocabulary(), guide(name)))) is None:
            continue
        found = told(read(name, [text]))
        num_calls += len(found)
        assert found
        for called, arguments, end in found:
            schema = BY_NAME[called].parameters or {"maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)
            assert end == "ended"
            if called == "get_weather":
                assert set(json.loads(arguments)) <= set(WEATHER["properties"])  # nothing is invented
    assert num_calls >= 6


@pytest.mark.parametrize("name", READ)
def test_how_a_family_writes_its_calls_is_what_its_grammar_accepts(name: str) -> None:
    written = FORMATS[name].shape.written
    one, two = written([("f", "{}")]), written([("f", "{}"), ("get_weather", '{"city": "Rome", "unit": "celsius"}')])
    assert accepts(guide(name), one)
    assert accepts(guide(name), two)
    assert accepts(guide(name, most=1), one)
    assert not accepts(guide(name, most=1), two)
    assert not accepts(guide(name), f"Well, {one}")
    assert not accepts(guide(name), "Hello")
    assert not accepts(guide(name, [Tool("g")]), one)
    assert not accepts(guide(name), written([("get_weather", '{"unit": "celsius"}')]))


STRICT = [Tool("f"), Tool("get_weather", WEATHER, strict=True)]


@pytest.mark.parametrize("name", READ)
def test_whoever_may_call_is_free_until_it_does(name: str) -> None:
    free = guide(name, STRICT, is_required=False)
    written = FORMATS[name].shape.written
    assert accepts(free, "Hello, world.\n")
    assert accepts(free, "")
    assert accepts(free, written([("get_weather", '{"city": "Rome", "unit": "celsius"}')]))
    assert not accepts(free, written([("get_weather", '{"city": "Rome"}')]))
    assert not accepts(free, written([("unheard_of", "{}")]))
    if FORMATS[name].shape.mark:
        assert accepts(free, f"So: {written([('f', '{}')])}")


@pytest.mark.parametrize("name", READ)
def test_an_answer_without_a_call_follows_its_own_schema(name: str) -> None:
    answer = Guide("json_schema", '{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}')
    either = guide(name, is_required=False, otherwise=answer)
    assert accepts(either, '{"sum": 4}')
    call = FORMATS[name].shape.written([("f", "{}")])
    assert accepts(either, call if FORMATS[name].shape.mark else f"{FORMATS[name].syntax.mark}{call}")
    assert not accepts(either, "four")
    assert not accepts(either, '{"sum": "four"}')


def test_a_call_that_is_a_message_of_its_own_begins_with_its_name() -> None:
    call = FORMATS["harmony"].shape.written([("get_weather", '{"city": "Rome", "unit": "celsius"}')])
    assert call == 'get_weather <|constrain|>json<|message|>{"city": "Rome", "unit": "celsius"}'
    assert accepts(guide("harmony"), call)
    assert not accepts(guide("harmony"), call * 2)
    assert not accepts(guide("harmony"), call.replace("celsius", "warm"))
    assert FORMATS["harmony"].guide(STRICT, {}, is_required=False) is None
    answer = Guide("json_schema", "{}")
    assert FORMATS["harmony"].guide(STRICT, {}, is_required=False, otherwise=answer) is answer


def test_nobody_is_guided_who_need_not_be() -> None:
    assert FORMATS["hermes"].guide(TOOLS, {}, is_required=False) is None


def test_only_who_says_strict_is_refused_for_what_a_grammar_cannot_express() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}, "uniqueItems": True}}}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        Matcher(vocabulary(), guide("hermes", [Tool("f", odd, strict=True)]))
    assert accepts(
        guide("hermes", [Tool("f", odd)]), '<tool_call>\n{"name": "f", "arguments": {"a": []}}\n</tool_call>'
    )


def test_who_says_not_strict_gets_any_object() -> None:
    any_object = guide("llama3", [Tool("get_weather", WEATHER, strict=False)])
    assert accepts(any_object, '{"name": "get_weather", "parameters": {"x": [1]}}')


def test_a_schema_that_speaks_of_other_properties_keeps_them() -> None:
    open_schema = WEATHER | {"additionalProperties": {"type": "integer"}}
    found = guide("llama3", [Tool("f", open_schema)])
    assert accepts(found, '{"name": "f", "parameters": {"city": "Rome", "unit": "celsius", "more": 4}}')


def test_a_mark_that_is_a_token_is_forced_and_read_as_that_token() -> None:
    begin = tokenizer().encode("<s>", add_special_tokens=False)
    assert tokenizer().special_id("<s>") == begin[0]
    shape, syntax = Shape("<s>", opening="[", separator=", ", closing="]"), Syntax("<s>")
    marked = replace(FORMATS["mistral"], shape=shape, syntax=syntax, marks=("<s>",))
    for is_required in (True, False):
        found = marked.guide([Tool("f", strict=True)], {"<s>": begin[0]}, is_required=is_required)
        assert found is not None
        matcher = Matcher(vocabulary(), found)
        token_ids = tokenizer().encode('<s>[{"name": "f", "arguments": {}}]', add_special_tokens=False)
        assert token_ids[0] == begin[0]
        assert matcher.take(token_ids)
        assert 2 in allowed(matcher.mask())
        assert not Matcher(vocabulary(), found).take([*begin, *tokenizer().encode("x", add_special_tokens=False)])
    text = Detokenizer(tokenizer(), prompt_ids=[5], kept_ids=frozenset(begin)).push(token_ids)
    assert [type(part) for part in marked.parser([Tool("f")]).push(text)] == [CallBegun, CallArguments, CallEnded]
    assert "<s>" not in Detokenizer(tokenizer(), prompt_ids=[5]).push(token_ids)


def test_a_mark_that_is_a_token_is_written_as_that_token() -> None:
    special = {"[TOOL_CALLS]": 9, "[ARGS]": 32}
    assert literal('[TOOL_CALLS]f[ARGS]"', special) == '<[9]> "f" <[32]> "\\""'
    lines = FORMATS["mistral_v11"].guide([Tool("f")], special, is_required=True).source.splitlines()  # type: ignore[union-attr]
    assert lines[1] == "block: <[9]> call"
    assert lines[3].startswith('call_0: "f" <[32]> arguments_0')
