"""A prompt that the gateway has tokenized goes to a penstock replica as ids, and the answer is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from penstock.api.relay import open_envelope
from penstock.gateway.proxy import transcript
from penstock.gateway.proxy.request_view import read
from penstock.gateway.tokens.prompt_tokenizer import CHAT
from penstock.gateway.tokens.request_size import Pool, Size
from tests.gateway.lexicons import prompt_tokenizer
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.sdk import Unverified
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

LONG = "the words of a long question about many things " * 60
MESSAGES: Any = [{"role": "user", "content": LONG}]
ANSWER = [*MESSAGES, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]


@pytest.fixture
def replicas(two_replicas: list[Replica]) -> list[Replica]:
    return two_replicas


@pytest.fixture
def gateway(replicas: list[Replica]) -> Iterator[RunningGateway]:
    with running_gateway(*replicas) as found:
        eventually(lambda: found.app.pools[NAME].tokens.prompt_tokenizer is not None)
        yield found
        eventually(found.is_idle)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of what goes out from now on."""
    found: list[list[int]] = []

    def sealed(request: bytes, prompt_ids: bytes) -> bytes:
        envelope = original(request, prompt_ids)
        found.extend(open_envelope(envelope).prompt_ids or [])
        return envelope

    original = transcript.sealed
    monkeypatch.setattr(transcript, "sealed", sealed)
    return found


def test_chats_whole_and_streamed_turn_by_turn(
    gateway: RunningGateway, replicas: list[Replica], sent: list[list[int]]
) -> None:
    for messages in (MESSAGES, ANSWER, ANSWER):  # the second goes on from the first, the third is remembered
        expected = replicas[0].answer(messages, 12)
        asked: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0}
        whole = gateway.openai.chat.completions.create(**asked)
        assert whole.choices[0].message.content == expected
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(replicas[0].prompt_ids(messages))
        chunks = gateway.openai.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    ids = [replicas[0].prompt_ids(messages) for messages in (MESSAGES, ANSWER, ANSWER)]
    assert sent == [each for each in ids for _ in range(2)]


def test_completions_and_anthropics_messages(
    gateway: RunningGateway, replicas: list[Replica], sent: list[list[int]]
) -> None:
    done = gateway.openai.completions.create(model=NAME, prompt=LONG, max_tokens=12, temperature=0, echo=True)
    assert done.choices[0].text == LONG + replicas[0].answer(LONG, 12)
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, http_client=Unverified())
    message = client.messages.create(model=NAME, messages=MESSAGES, max_tokens=12, extra_body={"temperature": 0})
    assert message.content[0].text == replicas[0].answer(MESSAGES, 12)  # type: ignore[union-attr]
    assert sent == [replicas[0].prompt_ids(LONG), replicas[0].prompt_ids(MESSAGES)]


def test_a_prompt_that_is_cut_is_sent_as_what_is_left_of_it(
    gateway: RunningGateway, replicas: list[Replica], sent: list[list[int]]
) -> None:
    options: Any = {"max_tokens": 8, "temperature": 0, "extra_body": {"truncate_prompt_tokens": 300}}
    cut = gateway.openai.completions.create(model=NAME, prompt=LONG, **options)
    assert cut.usage is not None
    assert cut.usage.prompt_tokens == 300
    assert sent == [replicas[0].prompt_ids(LONG)[-300:]]
    by_ids = gateway.openai.completions.create(model=NAME, prompt=replicas[0].prompt_ids(LONG), **options)
    assert by_ids.choices[0].text == cut.choices[0].text
    assert len(sent) == 1  # the client sent ids itself: there is nothing to win


def test_what_the_gateway_need_not_tokenize_it_does_not(gateway: RunningGateway, sent: list[list[int]]) -> None:
    gateway.openai.completions.create(model=NAME, prompt="short", max_tokens=2)
    gateway.openai.completions.create(model=NAME, prompt=[LONG, LONG], max_tokens=2)
    assert sent == []


def test_a_stream_of_a_prompt_sent_as_ids_goes_on_elsewhere() -> None:
    with slow_and_fast(chunk_tokens=2048) as (gateway, slow, fast):
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 3}
        whole = fast.openai.chat.completions.create(**asked).choices[0].message.content
        text = ""
        for number, chunk in enumerate(gateway.openai.chat.completions.create(**asked, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if number == 3:
                gateway.set_in_use(fast, True)
                slow.kill_engine()
        assert text == whole
        assert "streams_carried_on_total" in gateway.metrics()


def test_a_replica_with_another_tokenizer_is_sent_text() -> None:
    async def run() -> None:
        body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
        with ThreadPoolExecutor(1) as threads:
            pool, asked = Pool(threads), read(body)
            pool.tokens.prompt_tokenizer = prompt_tokenizer()
            size = Size(pool, CHAT, body, asked, None, "")
            assert size.ids_for(prompt_tokenizer().digest) == b""
            done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            size.name(asked, "", "", done.set_result)
            assert await done is None
            assert size.ids_for(prompt_tokenizer().digest).startswith(b"[[")
            assert size.ids_for("another") == b""

    asyncio.run(run())
