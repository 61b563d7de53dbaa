"""Conversations through a template of gpt-oss' shape: thoughts before calls, several calls in a turn, results."""

from __future__ import annotations

import json
from typing import Any

from penstock.api.openai.chat import parse_chat
from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import render
from tests.text.harmony import GPT_OSS

USER = {"role": "user", "content": "Rome?"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
SYSTEM = (
    "<|start|>system<|message|>You are a model.\nReasoning: medium\n\n# Valid channels: analysis, commentary, final."
    "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
)
BEGIN = f"{SYSTEM}<|start|>developer<|message|>\n# Tool weather\n# Tool time<|end|><|start|>user<|message|>Rome?<|end|>"


def call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, number: int) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number}"}


def rendered(*messages: dict[str, Any], **more: Any) -> str:
    body = {"model": "m", "messages": [USER, *messages], "tools": TOOLS, **more}
    return render(ChatTemplate(GPT_OSS), parse_chat(json.dumps(body).encode())).removeprefix(BEGIN)


def test_the_format_is_told_from_the_template() -> None:
    template = ChatTemplate(GPT_OSS)
    assert template.tool_format.name == "harmony"
    assert template.reasoning is not None
    assert template.reasoning.name == "harmony"
    assert rendered() == "<|start|>assistant"


def test_thoughts_before_a_call_are_told_and_its_arguments_are_an_object() -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [call("weather", '{"a": 1}', 1)],
    }
    assert rendered(turn, result("sunny", 1)) == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|><|start|>assistant'
    )


def test_thoughts_of_turns_that_were_answered_are_not() -> None:
    turn = {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": [call("weather", "{}", 1)]}
    answer = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."}
    assert rendered(turn, result("sunny", 1), answer, USER) == (
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sunny"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|>"
        "<|start|>user<|message|>Rome?<|end|><|start|>assistant"
    )


def test_words_before_a_call_go_with_its_thoughts() -> None:
    turn = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [call("time", "{}", 1)],
    }
    assert "analysis<|message|>Hm.\nI look.<|end|><|start|>assistant to=functions.time<" in rendered(
        turn, result("9", 1)
    )


def test_each_call_of_a_turn_is_followed_by_its_own_result() -> None:
    calls = [call("weather", "{}", 1), call("time", "{}", 2)]
    turn = {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": calls}
    found = rendered(turn, result("9", 2), result("sunny", 1))
    assert found.count("analysis") == 1
    assert found.index("to=functions.weather") < found.index('"sunny"') < found.index("to=functions.time")
    assert '<|start|>functions.time to=assistant<|channel|>commentary<|message|>"9"' in found


def test_effort_reaches_the_template() -> None:
    body = {"model": "m", "messages": [USER], "reasoning_effort": "high"}
    text = render(ChatTemplate(GPT_OSS), parse_chat(json.dumps(body).encode()))
    assert "Reasoning: high\n" in text
