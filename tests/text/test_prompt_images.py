"""Images in chats as templates are given them: parts where a template reads parts, and turns where it writes none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.api.openai import ChatRequest, parse_chat
from penstock.text.chat import ChatTemplate
from penstock.text.prompt_encoder import render, render_with_images

PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string or m.role == 'tool' %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
    "{# tools #}"
)
STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def chat(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def shown(*texts: str | None) -> list[dict[str, Any]]:
    """Texts, and images where there is none."""
    image = {"type": "image_url", "image_url": "data:,"}
    return [image if text is None else {"type": "text", "text": text} for text in texts]


def test_a_template_says_whether_it_takes_texts() -> None:
    assert [ChatTemplate(source).takes_strings for source in (PARTS, BOTH, STRINGS)] == [False, True, True]
    assert ChatTemplate("{{ raise_exception('no') }}").takes_strings


def test_texts_are_parts_for_a_template_that_reads_parts_alone() -> None:
    told = chat({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    assert render(ChatTemplate(PARTS), told) == "[user]hi[assistant]ho"
    begun = chat({"role": "assistant", "content": "so it "}, continue_final_message=True)
    assert render(ChatTemplate(PARTS), begun) == "[assistant]so it"


@pytest.mark.parametrize("source", [PARTS, BOTH])
def test_images_are_where_they_are_shown(source: str) -> None:
    told = chat({"role": "user", "content": shown("a", None, "b", None)}, {"role": "user", "content": "c"})
    assert render_with_images(ChatTemplate(source), told, "<image>", 2) == "[user]a<image>b<image>[user]c"


def test_an_image_of_a_result_follows_it_where_the_template_writes_none_there() -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = chat(
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": shown("here", None)},
        {"role": "tool", "tool_call_id": "u", "content": shown(None, "there")},
        {"role": "user", "content": "well?"},
    )
    text = render_with_images(ChatTemplate(BOTH.replace("{# tools #}", "{{ tools }}")), told, "<image>", 2)
    assert text.replace("None", "").endswith("[tool]here[tool]there[user]<image><image>[user]well?")
    whole = render_with_images(ChatTemplate(PARTS), told, "<image>", 2)  # which knows no tools
    assert whole.endswith(
        "[user]<tool_response>\nhere<image>\n</tool_response>\n<tool_response>\n<image>there\n</tool_response>"
        "[user]well?"
    )
