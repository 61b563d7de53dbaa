"""Tools through a gateway: to replicas of its own, which may die in the middle of a call, and to others' servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tools.drills.call import begin, post

from penstock.core.request import Priority
from penstock.dialects.engines import DIALECTS
from penstock.dialects.requests import RequestOptions, outgoing
from tests.gateway.running import running_gateway
from tests.server.replica import NAME, serving
from tests.waiting import GIVE_UP_S, eventually

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 9}
    },
    "required": ["days"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
BODY: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "What is the weather?"}],
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 400,
    "seed": 7,
}


def arguments(events: list[dict[str, Any]]) -> tuple[str, str]:
    """What came of the one call, and how the answer ended."""
    deltas = [event["choices"][0]["delta"].get("tool_calls") for event in events]
    return "".join(delta[0]["function"]["arguments"] for delta in deltas if delta), events[-1]["choices"][0][
        "finish_reason"
    ]


@pytest.mark.slow
async def test_a_call_outlives_its_replica() -> None:
    with (
        serving(is_guided=True, step_s=0.01) as one,
        serving(is_guided=True, step_s=0.01) as two,
        running_gateway(one, two) as gateway,
    ):
        found = []
        for is_hurt in (False, True):
            call = await begin(gateway.port, post(CHAT, BODY | {"stream": True}))
            await call.at_event(6)
            if is_hurt:
                max((one, two), key=lambda replica: replica.engine.num_open).kill_engine()
            async with asyncio.timeout(GIVE_UP_S):
                await call.ended
            assert call.is_whole
            found.append(arguments(call.events()))
        assert found[0] == found[1]
        assert found[0][1] == "tool_calls"
        assert len(json.loads(found[0][0])["days"]) >= 9
        eventually(gateway.is_idle)


async def test_a_prompt_with_tools_is_counted_as_its_replica_counts_it() -> None:
    with serving(is_guided=True) as replica, running_gateway(replica) as gateway:
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        prompt_tokenizer = gateway.app.pools[NAME].tokens.prompt_tokenizer
        assert prompt_tokenizer is not None
        body = json.dumps(BODY | {"max_tokens": 1}).encode()
        _, _, answer = replica.call("POST", CHAT, body)
        assert prompt_tokenizer.count(CHAT.encode(), body) == answer["usage"]["prompt_tokens"]
        assert prompt_tokenizer.count(CHAT.encode(), body) <= prompt_tokenizer.bound(body)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_no_dialect_that_speaks_openai_changes_a_word_about_tools(name: str) -> None:
    dialect = DIALECTS[name]
    if dialect.native is not None:
        return
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [*BODY["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "18"})
    body = json.dumps(BODY | {"messages": messages}).encode()
    options = RequestOptions(priority=Priority.HIGH, salt="s".__add__, request_id="r", usage=True)
    sent = json.loads(outgoing(dialect, body, options))
    for field in ("messages", "tools", "tool_choice", "parallel_tool_calls"):
        assert sent[field] == json.loads(body)[field]
