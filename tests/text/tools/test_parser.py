"""From text to calls, in every family's format, and however the text is cut on its way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.tools import FORMATS, Tool
from penstock.text.tools.parts import CallArguments, CallBegun, Part, Text
from tests.text.tools.reading import NAMES, parser, read, told

GOOD: list[tuple[str, str, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', [("f", '{"a": "é"}', "ended")]),
    (
        "hermes",
        'Let me see. \n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a": [1, {}]}}</tool_call>\n',
        ["Let me see.", ("f", "{}", "ended"), ("g", '{"a": [1, {}]}', "ended")],
    ),
    (
        "hermes",
        'One <tool_call>{"name": "f", "arguments": {}}</tool_call> two',
        ["One", ("f", "{}", "ended"), "\ntwo"],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', [("f", '{"a": "}"}', "ended")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}', "ended")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}", "ended")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}", "ended")]),
    ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', [("unheard_of", "{}", "ended")]),
    (
        "smollm2",
        '<tool_call>[\n{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {}}\n]</tool_call>',
        [("f", '{"a": 1}', "ended"), ("g", "{}", "ended")],
    ),
    ("smollm2", "<tool_call>[]</tool_call>", []),
    (
        "deepseek",
        "Let me see.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"a": "é"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> done",
        ["Let me see.", ("get_weather", '{"a": "é"}', "ended"), ("f", "{}", "ended"), "\ndone"],
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "}<｜"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("f", '{"a": "}<｜"}', "ended"), ("g", "{}", "ended")],
    ),
    (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [("f", '{"a": 1}', "ended"), ("g", "{}", "ended")],
    ),
    (
        "glm",
        "Well.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris > Rome</arg_value>\n"
        '<arg_key>days</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>',
        ["Well.", ("get_weather", '{"city": "Paris > Rome", "days": [1, {"a": null}]}', "ended"), ("f", "{}", "ended")],
    ),
    (
        "glm",
        "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call></arg_value></tool_call> so",
        [("f", '{"a": "</tool_call>"}', "ended"), "so"],
    ),
    ("glm", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", '{"a": 1}', "ended")]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}', "ended"), ("g", "{}", "ended")],
    ),
    (
        "olmo3",
        'Look:\n<function_calls>\nget_weather(city="Paris", days=[1, true, null])\ng()\n</function_calls> and',
        [
            "Look:",
            ("get_weather", '{"city": "Paris", "days": [1, true, null]}', "ended"),
            ("g", "{}", "ended"),
            "\nand",
        ],
    ),
    (
        "olmo3",
        '<function_calls>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</function_calls>',
        [("f", "{}", "ended"), ("g", "{}", "ended")],
    ),
    ("llama4", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}', "ended")]),
    ("llama4", '<|python_start|>{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}', "ended")]),
    ("llama4", '[f(a="]"), g.call()]', [("f", '{"a": "]"}', "ended"), ("g", "{}", "ended")]),
    ("llama4", "<|python_start|>[f(a=1)]", [("f", '{"a": 1}', "ended")]),
    ("llama4", '[{"name": "f", "parameters": {}}]', [("f", "{}", "ended")]),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}', "ended")]),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 2}}',
        [("f", "{}", "ended"), ("g", '{"a": 2}', "ended")],
    ),
    ("llama3", '<|python_tag|>brave_search.call(query="a b")', [("brave_search", '{"query": "a b"}', "ended")]),
    (
        "llama3",
        "<|python_tag|>[f(a=[1, None]), g(b='x')]",
        [("f", '{"a": [1, null]}', "ended"), ("g", '{"b": "x"}', "ended")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        [("f", '{"a": 1}', "ended"), ("g", "{}", "ended")],
    ),
    (
        "mistral",
        'So:[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
        ["So:", ("f", '{"a": "[TOOL_CALLS]"}', "ended"), ("g", "{}", "ended")],
    ),
    ("mistral_v11", '[TOOL_CALLS]f{"a": 1}', [("f", '{"a": 1}', "ended")]),
]
NOT_QUITE: list[tuple[str, str, list[Any]]] = [
    ("hermes", "a < b, <tool_cal> and <tool_call", ["a < b, <tool_cal> and <tool_call"]),
    ("hermes", "See <tool_call>this</tool_call>.", ["See <tool_call>this</tool_call>."]),
    ("hermes", '<tool_call>{"age": 3}</tool_call>', ['<tool_call>{"age": 3}</tool_call>']),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}', ['<tool_call>{"name": 3, "arguments": {}}']),
    ("hermes", '<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    (
        "hermes",
        'no <tool_call>x <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ["no <tool_call>x", ("f", "{}", "ended")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", '{"a": 1', "cut")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so', [("f", '{"a": 1', "ended"), "so"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', [("f", '{"a": }', "ended")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', [("f", '{"a": "1\\n2"}', "ended")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_ca', [("f", "{}", "ended")]),
    ("hermes", "  plain text \n", ["  plain text \n"]),
    ("hermes", "", []),
    ("llama3", '{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
    ("llama3", "[f(a=1)]", ["[f(a=1)]"]),
    ("llama4", "[f] is a list", ["[f] is a list"]),
    ("llama4", "[unheard_of(a=1)]", ["[unheard_of(a=1)]"]),
    ("llama4", "[1, 2]", ["[1, 2]"]),
    ("llama4", '["f"]', ['["f"]']),
    ("glm", "<tool_call>so to speak", ["<tool_call>so to speak"]),
    ("olmo3", "<function_calls> are calls", ["<function_calls> are calls"]),
    ("olmo3", "<function_calls>\nimport os\n</function_calls>", ["<function_calls>\nimport os\n</function_calls>"]),
    ("llama3", '{"name": "Ann", "parameters": {}}', ['{"name": "Ann", "parameters": {}}']),
    ("llama3", '{"a": {"name": "f", "parameters": {}}}', ['{"a": {"name": "f", "parameters": {}}}']),
    ("llama3", 'JSON: {"name": "f", "parameters": {}}', ['JSON: {"name": "f", "parameters": {}}']),
    ("llama3", "<|python_tag|>import os\nos.exit()", ["<|python_tag|>import os\nos.exit()"]),
    ("llama3", "<|python_tag|>unheard_of.call(a=1)", ["<|python_tag|>unheard_of.call(a=1)"]),
    ("mistral", "[TOOL_CALLS]", ["[TOOL_CALLS]"]),
    ("mistral", "a [TOOL_CALLS]!", ["a [TOOL_CALLS]!"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), GOOD + NOT_QUITE)
def test_an_answer_is_read_as_its_family_means_it(name: str, text: str, expected: list[Any]) -> None:
    assert told(read(name, [text])) == expected
    assert told(read(name, text)) == expected  # a character at a time


def test_a_call_is_told_as_it_comes() -> None:
    reader, seen = parser("hermes"), list[Part]()
    for piece in ('<tool_call>{"name": "f", ', '"arguments": ', '{"a": ', '"b'):
        parts = reader.push(piece)
        seen += parts
        assert len(parts) == (piece != '<tool_call>{"name": "f", ' and piece != '"arguments": ') + (piece == '{"a": ')
    assert seen == [CallBegun(0, "f"), CallArguments(0, '{"a": '), CallArguments(0, '"b')]


def test_text_is_held_back_only_where_it_may_open_a_call() -> None:
    reader = parser("hermes")
    assert reader.push("Hello <") == [Text("Hello")]
    assert reader.push("b>") == [Text(" <b>")]


def test_after_the_last_call_that_is_wanted_it_hears_no_more() -> None:
    text = FORMATS["smollm2"].shape.written([("f", "{}"), ("g", "{}")])
    reader = parser("smollm2", most=1)
    reader.push(text)
    assert reader.is_done
    assert told(read("smollm2", [text], most=1)) == [("f", "{}", "ended")]
    assert told(read("smollm2", text + "more", most=1)) == [("f", "{}", "ended")]


# -- however it is cut

fragments = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": "f", ',
        '"arguments": ',
        '"parameters": ',
        '{"a": 1}',
        "}",
        "]",
        "[",
        ",",
        ";",
        " ",
        "\n",
        "x",
        "é🙂",
        '"',
        "\\",
        "f[ARGS]",
        "f(a=1)",
        "<tool",
        '{"name": "f"}',
    ]
)
texts = st.lists(fragments, max_size=14).map("".join) | st.sampled_from([text for _, text, _ in GOOD + NOT_QUITE])
formats = st.sampled_from(sorted(name for name in FORMATS if not FORMATS[name].is_alone))


@given(formats, texts, st.data())
def test_any_cut_of_a_text_gives_the_same_parts(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    most = data.draw(st.none() | st.integers(1, 2))
    assert read(name, pieces, most) == read(name, [text], most)


@given(formats, texts, st.data())
def test_what_told_nothing_can_be_pushed_again_with_what_follows(name: str, text: str, data: st.DataObject) -> None:
    """As a stream is carried on: ids of which nothing was told come again with the next ones."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=3, max_size=3)))
    before, held, after = (text[a:b] for a, b in zip([0, *cuts[:2]], cuts, strict=True))
    one, other = parser(name), parser(name)
    assert one.push(before) == other.push(before)
    if not one.push(held):
        assert one.push(after) == other.push(held + after)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)


@given(formats, calls, st.booleans())
def test_what_is_written_is_read_again(name: str, wanted: list[tuple[str, dict[str, Any]]], is_ascii: bool) -> None:
    text = FORMATS[name].shape.written([(tool, json.dumps(of, ensure_ascii=is_ascii)) for tool, of in wanted])
    found = told(read(name, text))
    assert [(call[0], json.loads(call[1]), call[2]) for call in found] == [(tool, of, "ended") for tool, of in wanted]


@given(formats, st.text("ab {}[]<>\"'\\\n", max_size=40))
def test_a_text_without_a_call_stays_what_it_is(name: str, text: str) -> None:
    found = read(name, text)
    assert "".join(part.text for part in found if isinstance(part, Text)) == text


def test_a_value_is_a_text_where_the_schema_says_so() -> None:
    tool = Tool("f", {"type": "object", "properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}})
    reader = FORMATS["glm"].parser([tool])
    values = "<arg_key>zip</arg_key><arg_value>00184</arg_value><arg_key>days</arg_key><arg_value>3</arg_value>"
    parts = reader.push(f"<tool_call>f\n{values}</tool_call>")
    assert told(parts) == [("f", '{"zip": "00184", "days": 3}', "ended")]
