"""How each family is told of its tools, by its template or without its help."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import render
from penstock.text.tools import FORMATS, choose

CALL = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Do it."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL | {"id": "call_def"}]},
    {"role": "tool", "content": "4", "tool_call_id": "call_abc"},
    {"role": "tool", "content": "5", "tool_call_id": "call_def"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
KNOWING = """{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.id }}={{ call.function.arguments | tojson }}{% endfor %}
{%- if message.tool_call_id %}{{ message.tool_call_id }}{% endif %}{% endfor %}"""


class Chat:
    continue_final_message = False

    def __init__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        self._messages, self._tools = messages, tools

    def template_variables(self) -> dict[str, Any]:
        return {}

    def conversation(self) -> list[dict[str, Any]]:
        return self._messages

    def offered_tools(self) -> list[dict[str, Any]]:
        return self._tools

    def opens_answer(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '[TOOL_CALLS] [' }} [INST]", "mistral"),
        ("{{ '[TOOL_CALLS]' }}{{ '[ARGS]' }}", "mistral_v11"),
        ("<|im_start|> <tool_call>", "hermes"),
        ("<|start_header_id|> <tool_call>", "hermes"),  # Hermes 3 is a Llama
        ("<|start_header_id|> ipython", "llama3"),
        ("<|header_start|> ipython", "llama4"),
        ("[gMASK]<sop> <tool_call> <arg_key>", "glm"),
        ("<|start_of_role|>assistant<|end_of_role|> <|tool_call|>", "granite"),
        ("<|start_of_role|>assistant<|end_of_role|> <tool_call>", "hermes"),  # Granite 4
        ("<functions></functions> <function_calls>", "olmo3"),
        ("You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>", "smollm2"),
        ("<start_of_turn>", "hermes"),
        ("", "hermes"),
        ("{{ '<｜tool▁calls▁begin｜>' }}{{ '\n' + '```json' }}", "deepseek"),
        ("{{ '<｜tool▁calls▁begin｜>' }} <think>", "deepseek_v31"),
        ("<|tool_calls_section_begin|>", "kimi"),
    ],
)
def test_a_format_is_told_from_the_template(template: str, name: str) -> None:
    assert choose(template).name == name


def test_a_setting_is_stronger_than_the_template_and_an_unknown_one_is_not() -> None:
    assert choose("[TOOL_CALLS]", "llama3").name == "llama3"
    assert choose("[TOOL_CALLS]", "of a newer replica").name == "mistral"


def test_a_template_that_knows_tools_is_given_them_as_they_are() -> None:
    text = render(ChatTemplate(KNOWING, tool_format="hermes"), Chat(CONVERSATION, TOOLS))
    assert text.startswith("[f]<user>Do it.<assistant>")
    assert 'call_abc={"a": "é"}' in text
    assert text.endswith("<tool>4call_abc<tool>5call_def")
    assert render(ChatTemplate(KNOWING), Chat(CONVERSATION, [])).startswith("<user>")


def test_mistrals_templates_are_given_ids_that_they_take() -> None:
    text = render(ChatTemplate(KNOWING, tool_format="mistral"), Chat(CONVERSATION, TOOLS))
    first, second = (part[:9] for part in text.split("<assistant>")[1].split("<tool>")[0].split('={"a": "é"}')[:2])
    assert (first + second).isalnum()
    assert first != second
    assert text.endswith(f"<tool>4{first}<tool>5{second}")
    kept = [{"role": "tool", "content": "4", "tool_call_id": "abcDEF123"}]
    assert FORMATS["mistral"].for_template(kept) == kept


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_template_that_knows_no_tools_gets_them_spelled_out(name: str) -> None:
    text = render(ChatTemplate(PLAIN, tool_format=name), Chat(CONVERSATION, TOOLS))
    system, _, rest = text.partition("<user>")
    assert system.startswith("<system>")
    assert json.dumps(TOOLS) in system
    written = FORMATS[name].shape.written([("f", '{"a": "é"}')] * 2)
    results = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
    assert rest == f"Do it.<assistant>{written}<user>{results}"


def test_what_the_system_was_told_stays_first() -> None:
    told = [{"role": "system", "content": "Be brief."}, *CONVERSATION]
    text = render(ChatTemplate(PLAIN), Chat(told, TOOLS))
    assert text.startswith("<system>Be brief.\n\nYou can call functions")
    assert text.count("<system>") == 1
    assert "\nYou can" not in render(ChatTemplate(PLAIN), Chat(told, []))


def test_ids_are_the_same_everywhere_and_no_two_are_alike() -> None:
    for tool_format in FORMATS.values():
        ids = [tool_format.call_id("call_", "chatcmpl-1", choice, number) for choice in range(3) for number in range(3)]
        assert len(set(ids)) == 9
        assert ids[0] == tool_format.call_id("call_", "chatcmpl-1", 0, 0)
        assert all(len(i) == 9 and i.isalnum() if tool_format.id_characters else i.startswith("call_") for i in ids)
