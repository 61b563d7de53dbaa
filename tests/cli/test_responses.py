"""`penstock serve smollm2` and the Responses API, and `penstock gateway`, whose responses outlive it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.cli.real_gateway import RealGateway, real_gateway
from tests.cli.real_server import MODEL, RealServer
from tests.sdk import Unverified
from tests.server.replica import NAME, serving
from tests.waiting import eventually

pytestmark = pytest.mark.slow

FRANCE: Any = {"role": "user", "content": "What is the capital of France?"}
GREEDY: Any = {"model": MODEL, "max_output_tokens": 40, "temperature": 0}


def test_it_knows_the_capital_of_france(server: RealServer) -> None:
    answer: Response = server.openai.responses.create(input=FRANCE["content"], **GREEDY)
    chat: Any = server.openai.chat.completions.create(model=MODEL, messages=[FRANCE], max_tokens=40, temperature=0)
    assert "Paris" in answer.output_text
    assert answer.output_text == chat.choices[0].message.content, "both APIs ask the model the same"
    assert answer.status == "completed"
    with server.openai.responses.stream(input=FRANCE["content"], **GREEDY) as stream:
        assert stream.get_final_response().output_text == answer.output_text


def test_a_conversation_is_remembered(server: RealServer) -> None:
    named: Any = {"role": "user", "content": "My name is Ada. Please remember it."}
    first: Response = server.openai.responses.create(input=[named], **GREEDY)
    asked: Any = [named, *first.output, {"role": "user", "content": "What is my name?"}]
    second: Response = server.openai.responses.create(input=asked, **GREEDY)
    assert "Ada" in second.output_text
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens, "the first turn is in the prefix cache"


def client(gateway: RealGateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, http_client=Unverified())


def test_responses_outlive_the_gateway_that_kept_them(tmp_path: Path) -> None:
    asked: Any = {"model": NAME, "max_output_tokens": 12, "temperature": 0}
    with serving() as replica:
        with real_gateway(tmp_path, replica) as gateway:
            first = client(gateway).responses.create(input="one", **asked)
            queued = client(gateway).responses.create(input="two", background=True, **asked)
            eventually(
                lambda: client(gateway).responses.retrieve(queued.id).status, lambda status: status == "incomplete"
            )
        with real_gateway(tmp_path, replica) as gateway:
            assert client(gateway).responses.retrieve(first.id) == first
            second = client(gateway).responses.create(input="and?", previous_response_id=first.id, **asked)
            turns = [("user", "one"), ("assistant", first.output_text), ("user", "and?")]
            assert second.output_text == replica.answer([{"role": one, "content": said} for one, said in turns], 12)
            assert client(gateway).responses.retrieve(queued.id).output_text
