"""Thoughts through each API, of a model that says what it is told to: the prompt up to its first `</s>`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api.openai.chat import parse_chat
from penstock.server.reasoning import ReasoningLimits
from tests.server.replica import NAME, Replica, serving

THOUGHT = "<think>\nIs it so? It is.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]
SAID = "{{ messages[-1].content }}</s>"
LIMITS: Any = {"max_tokens": 200}


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(template=f"{SAID}{{# <think> #}}", echoes=True) as found:
        yield found


@pytest.fixture(scope="module")
def opened() -> Iterator[Replica]:
    """One whose template opens the thoughts."""
    with serving(template=f"{SAID}<think>\n", echoes=True) as found:
        yield found


@pytest.fixture(scope="module")
def harmony() -> Iterator[Replica]:
    with serving(template=f"{SAID}{{# <|channel|> <|message|> #}}<|start|>assistant", echoes=True) as found:
        yield found


def ask(replica: Replica, said: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": said}]
    status, _, answer = replica.post("/v1/chat/completions", messages=messages, **LIMITS | options)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def streamed(replica: Replica, path: str, said: str, **options: Any) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": said}], "stream": True} | LIMITS | options
    status, _, content = replica.post(path, **body)
    assert status == 200, content
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def num_tokens(replica: Replica, text: str) -> int:
    return len(replica.model.tokenizer.encode(text, add_special_tokens=False))


def test_a_chat_tells_thoughts_apart_under_both_names_and_counts_them(replica: Replica) -> None:
    answer = ask(replica, f"{THOUGHT}Yes.")
    message = answer["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning_content"] == message["reasoning"] == "Is it so? It is.\n"
    inside = THOUGHT.removeprefix("<think>").removesuffix("\n\n")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens(replica, inside)}


def test_an_answer_without_thoughts_is_one(replica: Replica) -> None:
    answer = ask(replica, "Yes.")
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_tells_thoughts_before_the_answer(opened: Replica) -> None:
    chunks = streamed(opened, "/v1/chat/completions", "Hm.</think>Yes.", stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(thoughts) == "Hm."
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == thoughts
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "content", "thoughts"),
    [
        ({"include_reasoning": False}, "Yes.", None),
        ({"reasoning": {"exclude": True}}, "Yes.", None),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, "Yes.", None),
        ({"separate_reasoning": False}, f"{THOUGHT}Yes.", None),
        ({}, "Yes.", "Is it so? It is.\n"),
    ],
)
def test_a_client_may_want_no_thoughts_or_have_them_in_the_answer(
    replica: Replica, options: dict[str, Any], content: str, thoughts: str | None
) -> None:
    answer = ask(replica, f"{THOUGHT}Yes.", **options)
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, thoughts)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_call_follows_the_thoughts(replica: Replica) -> None:
    choice = ask(replica, f"{THOUGHT}{CALL}", tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Is it so? It is.\n"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_call_among_thoughts_is_none(replica: Replica) -> None:
    choice = ask(replica, f"<think>{CALL}</think>No.", tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == CALL


def test_channels_of_harmony_are_thoughts_answers_and_calls(harmony: Replica) -> None:
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    )
    choice = ask(harmony, said, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    message = ask(harmony, said)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_a_message_has_blocks_of_thoughts(replica: Replica) -> None:
    messages = [{"role": "user", "content": f"{THOUGHT}Yes."}]
    _, _, answer = replica.post("/v1/messages", messages=messages, **LIMITS)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    thinking, text = answer["content"]
    assert thinking["thinking"] == "Is it so? It is.\n"
    assert text["text"] == "Yes."
    events = streamed(replica, "/v1/messages", f"{THOUGHT}Yes.")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thoughts = [delta["thinking"] for delta in deltas if delta["type"] == "thinking_delta"]
    assert "".join(thoughts) == "Is it so? It is.\n"
    (signature,) = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
    assert signature == thinking["signature"]
    kinds = [delta["type"] for delta in deltas]
    assert kinds == sorted(kinds, key=["thinking_delta", "signature_delta", "text_delta"].index)


@pytest.mark.parametrize("is_opened", [True, False])
def test_a_response_has_an_item_of_thoughts(replica: Replica, opened: Replica, is_opened: bool) -> None:
    said = "Hmm.</think>\n\nYes."
    status, _, content = (opened if is_opened else replica).post(
        "/v1/responses", input=said if is_opened else f"<think>{said}", stream=True, max_output_tokens=200
    )
    assert status == 200
    last = json.loads(content.rstrip().rpartition(b"data: ")[2])["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in last["output"]] == ["Hmm.", "Yes."]
    assert last["usage"]["output_tokens_details"]["reasoning_tokens"] == num_tokens(replica, "Hmm.</think>")


def test_an_operators_limit_cuts_what_is_asked() -> None:
    assert ReasoningLimits().budget(None) is None
    assert ReasoningLimits(default=10).budget(None) == 10
    assert ReasoningLimits(default=10).budget(20) == 20
    assert ReasoningLimits(most=8).budget(None) == 8
    assert ReasoningLimits(default=10, most=8).budget(20) == 8


def test_all_names_of_a_budget_mean_the_same() -> None:
    def budget(**fields: Any) -> int | None:
        messages = [{"role": "user", "content": "x"}]
        return parse_chat(json.dumps({"model": NAME, "messages": messages, **fields}).encode()).reasoning_asked().budget

    assert budget() is None
    assert budget(max_reasoning_tokens=5) == budget(thinking_budget=5) == budget(thinking_token_budget=5) == 5
    assert budget(thinking={"type": "enabled", "budget_tokens": 5}, reasoning={"max_tokens": 5}) == 5


def test_a_request_that_says_two_things_is_refused(replica: Replica) -> None:
    for options in (
        {"thinking_budget": 5, "max_reasoning_tokens": 6},
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"thinking": {"type": "disabled", "budget_tokens": 1}},
        {"stream_reasoning": False},
    ):
        status, _, answer = replica.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **options)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
