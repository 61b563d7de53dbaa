import json
from typing import Any

import pytest

from penstock.api.tokenization import parse_tokenize

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("body", "adds"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"messages": MESSAGES}, False),
        ({"messages": MESSAGES, "add_special_tokens": True}, True),
    ],
)
def test_a_prompt_has_special_tokens_and_a_chat_has_its_templates_own(body: Any, adds: bool) -> None:
    assert parse_tokenize(json.dumps(body).encode()).adds_special_tokens() is adds


def test_a_chat_is_said_as_to_the_chat_endpoint() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    asked = {"messages": MESSAGES, "tools": tools, "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False}
    chat = parse_tokenize(json.dumps(asked).encode()).chat()
    assert chat is not None
    assert [tool["function"]["name"] for tool in chat.offered_tools()] == ["look"]
    assert (chat.template_variables(), chat.opens_answer()) == ({"a": 1}, False)
