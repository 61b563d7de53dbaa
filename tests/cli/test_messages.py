"""`penstock serve smollm2`, and what an application does with Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock

from tests.cli.real_server import MODEL, PATIENCE_S, RealServer
from tests.waiting import eventually

pytestmark = pytest.mark.slow

FRANCE: Any = {"role": "user", "content": "What is the capital of France?"}
GREEDY: Any = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: RealServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def say(client: anthropic.Anthropic, *messages: Any, **options: Any) -> tuple[str, Message]:
    answer: Message = client.messages.create(messages=messages, **GREEDY | options)
    (block,) = answer.content
    assert isinstance(block, TextBlock)
    return block.text, answer


def test_it_knows_the_capital_of_france(client: anthropic.Anthropic, server: RealServer) -> None:
    text, answer = say(client, FRANCE)
    assert "Paris" in text
    assert answer.stop_reason == "end_turn"
    chat: Any = server.openai.chat.completions.create(model=MODEL, messages=[FRANCE], max_tokens=40, temperature=0)
    assert text == chat.choices[0].message.content, "both APIs ask the model the same"


def test_a_stream_says_the_same_as_the_whole(client: anthropic.Anthropic) -> None:
    text, whole = say(client, FRANCE)
    with client.messages.stream(messages=[FRANCE], **GREEDY) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens


def test_a_conversation_is_remembered(client: anthropic.Anthropic) -> None:
    named: Any = {"role": "user", "content": "My name is Ada. Please remember it."}
    _, first = say(client, named)
    text, second = say(
        client, named, {"role": "assistant", "content": first.content}, {"role": "user", "content": "What is my name?"}
    )
    assert "Ada" in text
    assert second.usage.cache_read_input_tokens, "the first turn is in the prefix cache"


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole, _ = say(client, FRANCE)
    text, answer = say(client, FRANCE, stop_sequences=["Paris"])
    assert text == whole[: whole.index("Paris")]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")


def test_an_answer_that_was_begun_is_continued(client: anthropic.Anthropic) -> None:
    text, _ = say(client, FRANCE, {"role": "assistant", "content": "The capital of France is"}, max_tokens=4)
    assert text.startswith(" Paris")


def test_the_count_is_that_of_the_answer(client: anthropic.Anthropic) -> None:
    system = "You are a geographer."
    count = client.messages.count_tokens(model=MODEL, messages=[FRANCE], system=system).input_tokens
    usage = say(client, FRANCE, system=system, max_tokens=1)[1].usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stream_that_is_left_ends_its_work(client: anthropic.Anthropic, server: RealServer) -> None:
    aborted = server.outcomes()["request_aborted"]
    count: Any = {"role": "user", "content": "Count from 1 to 500: 1, 2, 3, 4, 5, 6,"}  # which takes it a long time
    with client.messages.stream(messages=[count], **GREEDY | {"max_tokens": 2000}) as stream:
        next(iter(stream))
    eventually(server.left_over, lambda left: left == {})
    eventually(lambda: server.outcomes()["request_aborted"], lambda found: found == aborted + 1)
