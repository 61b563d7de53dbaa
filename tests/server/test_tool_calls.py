"""Tool calls from a whole replica, as OpenAI's and Anthropic's own clients see them. Its model says random things, so
that calls are made by those who must, and what random words come to is read by hand below."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from penstock.api.openai import parse_chat
from penstock.api.relay import StreamRecord
from penstock.core.request import FinishReason, TokenEvent
from penstock.server.choices import ChoiceText, Piece
from penstock.server.tool_calling import ToolCalling
from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopStrings
from penstock.text.tools import CallArguments, CallBegun, Text
from tests.sdk import Unverified
from tests.server.relaying import ask, block_ends, by_choice, carry_on, events
from tests.server.replica import NAME, Replica

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
USAGE = re.compile(rb'"usage":\{[^{}]*\}')
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 6, "maxLength": 12},
        "unit": {"enum": ["celsius", "fähig 🙂"]},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 6,
            "maxItems": 9,
        },
    },
    "required": ["city", "unit", "days"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time"}},
]
THEIRS: list[Any] = [
    {"name": "get_weather", "description": "Of a city", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def replica(guided_replica: Replica) -> Replica:
    return guided_replica


@pytest.fixture(scope="module")
def other(other_guided_replica: Replica) -> Replica:
    return other_guided_replica


@pytest.fixture(scope="module")
def claude(replica: Replica) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=f"http://{replica.host}:{replica.port}", api_key="none", max_retries=0, http_client=Unverified()
    )


def create(replica: Replica, **fields: Any) -> Any:
    settings: dict[str, Any] = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "max_tokens": 900, "seed": 3}
    return replica.openai.chat.completions.create(**settings | fields)


# -- OpenAI's


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_who_must_call_calls(replica: Replica, choice: Any) -> None:
    (answer,) = create(replica, tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert call.function.name in (["get_weather"] if choice is NAMED else ["get_weather", "get_time"])
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA if call.function.name == "get_weather" else {})


def test_choices_call_on_their_own_and_no_two_calls_share_an_id(replica: Replica) -> None:
    answers = create(replica, tool_choice=NAMED, n=3, temperature=1).choices
    calls = [call for answer in answers for call in answer.message.tool_calls]
    assert len(calls) >= 3
    assert len({call.id for call in calls}) == len(calls)
    assert len({call.function.arguments for call in calls}) > 1


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_tells_the_name_first_and_then_the_arguments_and_adds_up(replica: Replica, choice: Any) -> None:
    settings = {"tool_choice": choice, "temperature": 1}
    (whole,) = create(replica, **settings).choices
    chunks = list(create(replica, stream=True, **settings))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"]
    found: dict[int, list[str]] = {}
    for delta in (call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()):
        if delta.index not in found:
            assert delta.id.startswith("call_")
            assert (delta.type, delta.function.arguments) == ("function", "")
            found[delta.index] = [delta.function.name]
        else:
            assert (delta.id, delta.function.name) == (None, None)
            found[delta.index].append(delta.function.arguments)
    assert [(words[0], "".join(words[1:])) for words in found.values()] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert choice != NAMED or max(map(len, found.values())) > 3


def test_the_clients_own_accumulation_ends_at_the_same_calls(replica: Replica) -> None:
    settings: Any = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "seed": 3}
    with replica.openai.chat.completions.stream(**settings, max_tokens=900) as stream:
        streamed = stream.get_final_completion().choices[0]
    (whole,) = create(replica, tool_choice="required").choices
    assert streamed.finish_reason == "tool_calls"
    assert [call.function.arguments for call in streamed.message.tool_calls or ()] == [
        call.function.arguments for call in whole.message.tool_calls
    ]


def test_what_is_cut_by_the_limit_says_so(replica: Replica) -> None:
    full = create(replica, tool_choice=NAMED)
    for limit in (4, full.usage.completion_tokens - 8):
        cut = create(replica, tool_choice=NAMED, max_tokens=limit)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage.completion_tokens == limit
        assert not cut.choices[0].message.content
    (call,) = cut.choices[0].message.tool_calls
    assert full.choices[0].message.tool_calls[0].function.arguments.startswith(call.function.arguments)


def test_who_may_call_may_also_talk(replica: Replica) -> None:
    (answer,) = create(replica, max_tokens=12, logprobs=True).choices
    assert answer.message.tool_calls is None
    assert answer.message.content
    assert len(answer.logprobs.content) == 12
    chunks = list(create(replica, max_tokens=12, logprobs=True, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 12


def test_who_is_to_call_none_is_told_of_none(replica: Replica) -> None:
    plain = create(replica, tools=[], max_tokens=5)
    none = create(replica, tool_choice="none", max_tokens=5)
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert create(replica, max_tokens=5).usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_conversation_goes_on_with_what_its_tools_said(replica: Replica) -> None:
    called = create(replica, tool_choice="required").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18 °C"} for call in called.tool_calls]
    before = create(replica, max_tokens=1).usage.prompt_tokens
    answer = create(replica, messages=[*QUESTION, called, *results], max_tokens=5)
    assert answer.usage.prompt_tokens > before
    broken = called.model_dump(exclude_none=True)
    broken["tool_calls"][0]["function"]["arguments"] = '{"not": json'
    assert create(replica, messages=[*QUESTION, broken, *results], max_tokens=5).usage.prompt_tokens > before


def test_a_call_or_an_answer_of_its_own_form(replica: Replica) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"enum": ["four", "five"]}}}
    (answer,) = create(replica, response_format=form).choices
    assert answer.message.tool_calls or json.loads(answer.message.content) in ("four", "five")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": "x",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                    }
                ]
            },
            "messages[0].tool_calls",
        ),
        (
            {
                "tool_choice": NAMED,
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "get_weather",
                            "strict": True,
                            "parameters": {
                                "type": "object",
                                "properties": {"a": {"type": "array", "uniqueItems": True}},
                            },
                        },
                    }
                ],
            },
            "tools",
        ),
    ],
)
def test_a_bad_offer_is_refused_by_name(replica: Replica, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(replica, **fields)
    assert refused.value.param == param


# -- Anthropic's


def say(claude: anthropic.Anthropic, **fields: Any) -> Any:
    body = {"seed": 3, **fields.pop("body", {})}
    settings: dict[str, Any] = {"model": NAME, "messages": QUESTION, "tools": THEIRS, "max_tokens": 900}
    settings["extra_body"] = body
    return claude.messages.create(**settings | fields)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_anthropics_clients_get_their_calls(claude: anthropic.Anthropic, choice: Any) -> None:
    answer = say(claude, tool_choice=choice | {"disable_parallel_tool_use": True})
    (block,) = answer.content
    assert (answer.stop_reason, block.type) == ("tool_use", "tool_use")
    assert block.id.startswith("toolu_")
    jsonschema.validate(block.input, SCHEMA if block.name == "get_weather" else {})


def test_a_streamed_message_adds_up_to_the_whole_one(claude: anthropic.Anthropic) -> None:
    settings: Any = {"model": NAME, "messages": QUESTION, "tools": THEIRS, "max_tokens": 900}
    choice: Any = {"type": "tool", "name": "get_weather"}
    with claude.messages.stream(**settings, tool_choice=choice, extra_body={"seed": 3}) as stream:
        kinds = [event.type for event in stream]
        streamed: Any = stream.get_final_message()
    whole = say(claude, tool_choice=choice)
    assert streamed.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in streamed.content] == [(b.name, b.input) for b in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(streamed.content)
    assert kinds.count("input_json") > len(streamed.content)


def test_a_message_goes_on_with_what_its_tools_said(claude: anthropic.Anthropic) -> None:
    called = say(claude, tool_choice={"type": "any"})
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "18"}], "is_error": True}
        for block in called.content
    ]
    turns = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    counted = claude.messages.count_tokens(model=NAME, messages=turns, tools=THEIRS).input_tokens
    used = say(claude, messages=turns, max_tokens=5).usage
    assert used.input_tokens + used.cache_read_input_tokens == counted
    with pytest.raises(anthropic.BadRequestError, match="tool_result"):
        say(claude, messages=turns[:2])


def test_a_cut_call_is_no_tool_use(claude: anthropic.Anthropic) -> None:
    cut = say(claude, tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=30)
    assert cut.stop_reason == "max_tokens"


# -- carried on by another replica


def address(replica: Replica) -> tuple[str, int]:
    return replica.host, replica.port


def told(stream: bytes, path: str) -> dict[int | None, list[bytes]]:
    """But for what was used: a prompt that was seen before costs less."""
    found = by_choice(stream) if path == CHAT else {None: events(stream)}
    return {choice: [USAGE.sub(b"", event) for event in told] for choice, told in found.items()}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": TOOLS, "tool_choice": NAMED, "n": 2, "temperature": 1}),
        (CHAT, {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "logprobs": True}),
        (CHAT, {"tools": TOOLS, "stop": ["e"], "max_tokens": 40, "n": 3}),
        (MESSAGES, {"tools": THEIRS, "tool_choice": {"type": "tool", "name": "get_weather"}}),
    ],
)
def test_an_answer_that_is_cut_anywhere_is_carried_on(
    replica: Replica, other: Replica, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": NAME, "stream": True, "messages": QUESTION, "max_tokens": 250, "seed": 4} | fields
    request = json.dumps(body).encode()
    stream = ask(address(replica), path, request)
    expected = told(stream, path)
    ends = block_ends(stream)
    assert len(ends) > 20
    for end in ends[:: max(1, len(ends) // 8)]:
        record = StreamRecord()
        record.append(stream[:end])
        whole = stream[:end] + carry_on(record, address(other), path, request)
        assert told(whole, path) == expected, stream[:end][-300:]


# -- what a model says on its own


def pieces(replica: Replica, text: str, sizes: list[int], finish: FinishReason = FinishReason.STOP) -> list[Piece]:
    """The text as an engine would tell it, so many tokens at a time."""
    chat = parse_chat(json.dumps({"model": NAME, "messages": QUESTION, "tools": TOOLS}).encode())
    calling, tokenizer = ToolCalling.from_chat(chat, replica.model), replica.model.tokenizer
    detokenizer = Detokenizer(tokenizer, prompt_ids=[1], kept_ids=calling.mark_ids)
    reader = ChoiceText(0, detokenizer, tokenizer, StopStrings(["STOP"]), calling)
    token_ids, found = replica.model.tokenizer.encode(text, add_special_tokens=False), list[Piece]()
    while token_ids:
        size = sizes[len(found) % len(sizes)]
        found.append(reader.read_event(TokenEvent("r", token_ids[:size])))
        token_ids = token_ids[size:]
        if found[-1].finish is not None:
            return found
    found.append(reader.read_event(TokenEvent("r", [2] if finish is FinishReason.STOP else [], finish)))
    return found


CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "日🙂"}}\n</tool_call>'


@pytest.mark.parametrize("sizes", [[1], [3], [1, 4, 2], [1000]])
def test_characters_of_several_tokens_come_whole(replica: Replica, sizes: list[int]) -> None:
    found = pieces(replica, f"So: {CALL}", sizes)
    parts = [part for piece in found for part in piece.parts or ()]
    assert "".join(part.text for part in parts if isinstance(part, CallArguments)) == '{"zone": "日🙂"}'
    assert "".join(part.text for part in parts if isinstance(part, Text)) == "So:"
    assert [part.name for part in parts if isinstance(part, CallBegun)] == ["get_time"]
    assert (found[-1].finish, found[-1].is_calling) == (FinishReason.STOP, True)


def test_a_stop_string_inside_a_call_leaves_it_without_an_end(replica: Replica) -> None:
    last = pieces(replica, CALL.replace("日", "STOP"), [2])[-1]
    assert (last.finish, last.stop, last.is_calling) == (FinishReason.STOP, "STOP", False)


def test_an_answer_that_ends_at_its_limit_is_no_call_even_with_whole_calls(replica: Replica) -> None:
    last = pieces(replica, CALL, [2], FinishReason.LENGTH)[-1]
    assert (last.finish, last.is_calling) == (FinishReason.LENGTH, False)
