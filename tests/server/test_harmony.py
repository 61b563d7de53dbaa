"""gpt-oss' format through each API, with its marks as special tokens: thoughts apart, calls, and where answers end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.text.reasoning.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from tests.server.replica import Replica, serving
from tests.text import harmony

# What the model says: the prompt up to its first end of sequence. A conversation as the model sees it comes behind.
TEMPLATE = "{{ messages[-1].content }}</s>" + harmony.GPT_OSS
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
THOUGHT = f"{CHANNEL}analysis{MESSAGE}Is it so?{END}{START}assistant"
FINAL = f"{CHANNEL}final{MESSAGE}Yes.{RETURN} and no more"
CALLS = {
    "behind the channel": f'{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{{"a": 1}}{CALL} and no more',
    "before it": f' to=functions.f{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}{{"a": 1}}{CALL} and no more',
    "before it, without a type": f' to=functions.f{CHANNEL}commentary json{MESSAGE}{{"a": 1}}{CALL}',
    "on another channel": f'{CHANNEL}analysis to=functions.f code{MESSAGE}{{"a": 1}}{CALL}',
}
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}I call it.{END}{START}assistant"
LIMITS: Any = {"max_tokens": 300}


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    options: Any = {"echoes": True, "is_guided": True, "special": harmony.MARKS}
    with serving(template=TEMPLATE, tokenizer=harmony.tokenizer(), **options) as found:
        yield found


def asked(said: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": said}]


def events(content: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_marks_are_single_tokens(replica: Replica) -> None:
    tokenizer = replica.model.tokenizer
    assert [len(tokenizer.encode(mark, add_special_tokens=False)) for mark in harmony.MARKS] == [1] * 7
    assert tokenizer.decode(tokenizer.encode(f"a{CHANNEL}b", add_special_tokens=False)) == "ab"


def test_a_chat_ends_where_the_message_does(replica: Replica) -> None:
    status, _, answer = replica.post("/v1/chat/completions", messages=asked(THOUGHT + FINAL), **LIMITS)
    assert status == 200
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == ("Yes.", "Is it so?", "stop")
    inside = f"{MESSAGE}Is it so?{END}"
    count = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert count == len(replica.model.tokenizer.encode(inside, add_special_tokens=False)) - 1


def test_a_stream_tells_thoughts_first_and_no_mark(replica: Replica) -> None:
    _, _, content = replica.post("/v1/chat/completions", messages=asked(THOUGHT + FINAL), stream=True, **LIMITS)
    deltas = [event["choices"][0]["delta"] for event in events(content) if event["choices"]]
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Is it so?"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


@pytest.mark.parametrize("place", CALLS)
@pytest.mark.parametrize("before", [THOUGHT, "", THOUGHT + PREAMBLE], ids=["thoughts", "nothing", "words"])
def test_a_call_is_found_wherever_its_recipient_stands(replica: Replica, place: str, before: str) -> None:
    body: dict[str, Any] = {"messages": asked(before + CALLS[place]), "tools": TOOLS, **LIMITS}
    _, _, answer = replica.post("/v1/chat/completions", **body)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert [each["function"] for each in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert message.get("reasoning_content") == ("Is it so?" if before else None)
    assert (message["content"] or "") == ("I call it." if PREAMBLE in before else "")
    _, _, content = replica.post("/v1/chat/completions", stream=True, **body)
    deltas = [event["choices"][0]["delta"] for event in events(content) if event["choices"]]
    calls = [each["function"] for delta in deltas for each in delta.get("tool_calls") or ()]
    assert calls[0]["name"] == "f"
    assert "".join(each.get("arguments") or "" for each in calls) == '{"a": 1}'


def test_a_message_has_blocks_of_thoughts_and_calls(replica: Replica) -> None:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    for said, kinds in (
        (THOUGHT + FINAL, ["thinking", "text"]),
        (THOUGHT + CALLS["before it"], ["thinking", "tool_use"]),
        (THOUGHT + PREAMBLE + CALLS["behind the channel"], ["thinking", "text", "tool_use"]),
    ):
        body: dict[str, Any] = {"messages": asked(said), "tools": tools, **LIMITS}
        _, _, answer = replica.post("/v1/messages", **body)
        assert [block["type"] for block in answer["content"]] == kinds
        assert answer["content"][0]["thinking"] == "Is it so?"
        is_call = "tool_use" in kinds
        assert answer["stop_reason"] == ("tool_use" if is_call else "end_turn")
        assert not is_call or answer["content"][-1]["input"] == {"a": 1}
        _, _, content = replica.post("/v1/messages", stream=True, **body)
        told = events(content)
        begun = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
        assert begun == kinds
        deltas = [event["delta"] for event in told if event["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == "Is it so?"


def test_a_response_has_items_of_thoughts_and_calls(replica: Replica) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    for said, kinds in (
        (THOUGHT + FINAL, ["reasoning", "message"]),
        (THOUGHT + CALLS["before it"], ["reasoning", "function_call"]),
        (THOUGHT + CALLS["behind the channel"], ["reasoning", "function_call"]),
    ):
        body: dict[str, Any] = {"input": said, "tools": tools, "max_output_tokens": 300}
        _, _, whole = replica.post("/v1/responses", **body)
        _, _, content = replica.post("/v1/responses", stream=True, **body)
        for found in (whole, events(content)[-1]["response"]):
            assert [item["type"] for item in found["output"]] == kinds
            assert found["output"][0]["content"][0]["text"] == "Is it so?"
            last = found["output"][-1]
            if kinds[-1] == "message":
                assert last["content"][0]["text"] == "Yes."
            else:
                assert (last["name"], last["arguments"]) == ("f", '{"a": 1}')


def test_text_that_looks_like_a_call_is_text_where_no_tool_is_offered(replica: Replica) -> None:
    _, _, answer = replica.post("/v1/chat/completions", messages=asked(THOUGHT + CALLS["before it"]), **LIMITS)
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", '{"a": 1}')


OBJECT = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}


def test_a_guide_begins_in_the_final_channel(replica: Replica) -> None:
    """Whatever the model thought, and wherever it wanted to go on. It begins with a channel: the prompt ends so."""
    schema = {"type": "json_schema", "json_schema": {"name": "o", "schema": OBJECT}}
    for channel in ("final", "commentary"):
        said = f'analysis{MESSAGE}{{"b"}}{END}{START}assistant{CHANNEL}{channel}{MESSAGE}{{"a": 1}}{RETURN}'
        status, _, answer = replica.post("/v1/chat/completions", messages=asked(said), response_format=schema, **LIMITS)
        assert status == 200
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == '{"b"}'
        assert json.loads(message["content"]) == {"a": 1}


def test_a_guide_may_begin_without_thoughts(replica: Replica) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "o", "schema": OBJECT}}
    said = f'final{MESSAGE}{{"a": 1}}{RETURN}'
    _, _, answer = replica.post("/v1/chat/completions", messages=asked(said), response_format=schema, **LIMITS)
    message = answer["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ('{"a": 1}', None)


def test_a_call_that_must_come_follows_thoughts(replica: Replica) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": OBJECT, "strict": True}}]
    said = f'Hm.{END}{START}assistant{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{{"a": 1}}{CALL}'
    status, _, answer = replica.post(
        "/v1/chat/completions", messages=asked(said), tools=tools, tool_choice="required", **LIMITS
    )
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Hm."
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})


def test_thoughts_are_kept_to_a_budget(replica: Replica) -> None:
    said = f"{CHANNEL}analysis{MESSAGE}{'so ' * 40}{END}{START}assistant{FINAL}"
    _, _, answer = replica.post("/v1/chat/completions", messages=asked(said), thinking_budget=5, **LIMITS)
    assert 5 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
