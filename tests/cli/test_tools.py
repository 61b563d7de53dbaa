"""`penstock serve smollm2`, and what an agent does with it: a model of 135M calls when it must, and always well."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.cli.real_server import MODEL, PATIENCE_S, RealServer

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 40},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "sites": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,10}\\.(com|org)$"}, "maxItems": 2},
        "range": {"$ref": "#/$defs/range"},
    },
    "required": ["query", "limit", "sites", "range"],
    "$defs": {
        "range": {
            "type": "object",
            "properties": {"from": {"type": "string", "format": "date"}, "exact": {"type": "boolean"}},
            "required": ["from", "exact"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS = {"get_weather": WEATHER, "search_web": SEARCH}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def create(server: RealServer, **fields: Any) -> Any:
    settings: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 300}
    return server.openai.chat.completions.create(**settings | {"temperature": 0} | fields)


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_strict_arguments_always_follow_their_schema(server: RealServer, name: str) -> None:
    def ask(seed: int) -> Any:
        return create(server, tool_choice=named(name), parallel_tool_calls=False, temperature=1, seed=seed)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for answer in answers:
        (call,) = answer.choices[0].message.tool_calls
        if answer.choices[0].finish_reason == "tool_calls":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[name])
        else:
            assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 300)


def test_it_asks_for_the_weather_in_paris_whichever_client_asks(server: RealServer) -> None:
    (call,) = create(server, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris", "unit": "celsius"},
    )
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    theirs: Any = [{"name": name, "description": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, messages=QUESTION, tools=theirs, tool_choice=choice, max_tokens=300, extra_body={"temperature": 0}
    ) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Paris", "unit": "celsius"})


def test_a_stream_says_the_same_as_the_whole(server: RealServer) -> None:
    (whole,) = create(server, tool_choice=named("search_web"), parallel_tool_calls=False).choices[0].message.tool_calls
    chunks = create(server, tool_choice=named("search_web"), parallel_tool_calls=False, stream=True)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "search_web"
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert len(deltas) > 5, "it comes as it is written"


def test_what_a_tool_said_is_part_of_the_answer(server: RealServer) -> None:
    called = create(server, tool_choice=named("get_weather"), parallel_tool_calls=False).choices[0].message
    result = {
        "role": "tool",
        "tool_call_id": called.tool_calls[0].id,
        "content": "It is 31 degrees and sunny in Paris.",
    }
    answer = create(server, messages=[*QUESTION, called, result], max_tokens=60)
    assert "31" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens, "the first turn is in the prefix cache"
