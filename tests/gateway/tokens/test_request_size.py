"""Limits by the tokens a prompt really has: real clients, a gateway, and replicas that are real but for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.proxy.request_view import read
from penstock.gateway.settings.gateway import ModelSettings
from penstock.gateway.tokens.prompt_tokenizer import CHAT, COMPLETION, MESSAGES
from penstock.gateway.tokens.prompt_tokens import PromptTokens
from penstock.gateway.tokens.request_size import Pool, Size
from tests.examples import examples
from tests.gateway.lexicons import prompt_tokenizer
from tests.gateway.provider import providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.sdk import Unverified
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

encoded = msgspec.json.encode
LONG = "the words that come after the spaces " * 40  # 1,480 bytes, of far fewer tokens
TALK: Any = [{"role": "user", "content": LONG}]


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with serving(num_blocks=400) as found:  # a context of 1,600 tokens
        yield found


@pytest.fixture
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica) as found:
        eventually(lambda: found.app.pools[NAME].tokens.prompt_tokenizer is not None)
        yield found
        eventually(found.is_idle)
        eventually(replica.is_idle)


def ask(client: openai.OpenAI, max_tokens: int = 5, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=TALK, max_tokens=max_tokens, **more)


def test_the_gateway_counts_what_the_replica_bills(gateway: RunningGateway, replica: Replica) -> None:
    prompt_tokenizer = gateway.app.pools[NAME].tokens.prompt_tokenizer
    assert prompt_tokenizer is not None
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "größer 日本 🙂 <s> 12345"}]
    bodies: list[tuple[bytes, dict[str, Any]]] = [
        (CHAT, {"messages": talk}),
        (CHAT, {"messages": [*talk, {"role": "assistant", "content": "Well,"}], "continue_final_message": True}),
        (CHAT, {"messages": talk, "truncate_prompt_tokens": 7}),
        (COMPLETION, {"prompt": "größer 日本"}),
        (COMPLETION, {"prompt": ["the first", "the second", ""]}),
        (COMPLETION, {"prompt": [9, 8, 7]}),
        (COMPLETION, {"prompt": [[9, 8, 7], [6]]}),
        (MESSAGES, {"system": "be brief", "messages": talk[1:]}),
    ]
    at_gateway = replace(replica, port=gateway.port)
    for path, body in bodies:
        body |= {"model": NAME, "max_tokens": 2}
        status, _, answer = at_gateway.call("POST", path.decode(), body)
        assert status == 200, answer
        told = answer["usage"]
        billed = told.get("prompt_tokens") or told["input_tokens"] + told["cache_read_input_tokens"]
        assert prompt_tokenizer.count(path, encoded(body)) == billed
        eventually(lambda: bool(gateway.ledger.usages))
        assert gateway.ledger.usages.pop().input_tokens == billed


def test_a_prompt_may_have_more_bytes_than_max_input_has_tokens(gateway: RunningGateway, replica: Replica) -> None:
    tokens = len(replica.prompt_ids(TALK))
    assert tokens < len(LONG) / 2
    client = gateway.client(gateway.add_tenant("acme", limits={"max_input": tokens}))
    assert ask(client).usage.prompt_tokens == tokens
    client = gateway.client(gateway.add_tenant("acme", limits={"max_input": tokens - 1}))
    with pytest.raises(openai.BadRequestError, match=f"has {tokens} tokens; this tenant's limit is {tokens - 1}"):
        ask(client)


def test_what_fits_the_limit_by_its_tokens_is_let_in(gateway: RunningGateway, replica: Replica) -> None:
    tokens = len(replica.prompt_ids(TALK)) + 5
    client = gateway.client(gateway.add_tenant("acme", limits={"tokens_per_minute": tokens}))
    assert ask(client)


def test_what_never_fits_a_limit_is_told_so_and_not_when_to_come_back(
    gateway: RunningGateway, replica: Replica
) -> None:
    tokens = len(replica.prompt_ids(TALK)) + 5
    client = gateway.client(gateway.add_tenant("acme", limits={"tokens_per_minute": tokens - 1}))
    with pytest.raises(openai.BadRequestError, match=f"needs {tokens} tokens") as no:
        ask(client)
    assert f"more than this tenant's whole limit of {tokens - 1} tokens per minute" in str(no.value)
    assert no.value.code == "too_large_for_limit"
    assert no.value.body["reason"] == "too_large_for_limit"  # type: ignore[index]
    assert "retry-after" not in no.value.response.headers


def test_a_refusal_keeps_a_place_for_the_tokens_and_not_for_the_bytes(
    gateway: RunningGateway, replica: Replica
) -> None:
    """Two fit the minute by their tokens, and not even one by its bytes; the third is told when to come back."""
    tokens = len(replica.prompt_ids(TALK)) + 5
    limits = {"tokens_per_minute": 2 * tokens + 10}
    client = gateway.client(gateway.add_tenant("acme", limits=limits))
    for _ in range(2):
        ask(client, extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError) as refused:
        ask(client)
    assert int(refused.value.response.headers["retry-after"]) <= 61
    message = str(refused.value)
    assert f"{2 * tokens} of {2 * tokens + 10} tokens are used in the last 60 seconds" in message
    assert f"this request needs {tokens}; come back in" in message


def test_who_comes_back_when_told_is_let_in_by_its_tokens(gateway: RunningGateway, replica: Replica) -> None:
    """By the gateway's clock, which goes a hundred times slower than a client."""
    tokens = len(replica.prompt_ids(TALK)) + 5
    limits = {"tokens_per_minute": 60 * tokens, "smooth": True}  # ten at once, then one a second
    client = gateway.client(gateway.add_tenant("acme", limits=limits))
    with pytest.raises(openai.RateLimitError) as refused:
        [ask(client, extra_body={"ignore_eos": True}) for _ in range(11)]
    waits_s = float(refused.value.response.headers["retry-after"])
    assert waits_s <= 2  # a replica that says nothing for longer is out, by the same clock
    gateway.advance(waits_s)
    assert ask(client, extra_body={"ignore_eos": True})


def test_a_tenant_without_doubt_never_pays_for_a_count(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"tokens_per_minute": 10**6, "max_input": 4000}))
    ask(client)
    prompt_tokenizer = gateway.app.pools[NAME].tokens.prompt_tokenizer
    assert prompt_tokenizer is not None
    assert not len(prompt_tokenizer._counts)


def test_a_long_prompt_that_fits_the_context_is_not_refused_for_its_bytes(
    gateway: RunningGateway, replica: Replica
) -> None:
    context = replica.model.max_model_len
    words: Any = [{"role": "user", "content": " the words" * 400}]
    assert len(replica.prompt_ids(words)) < context < 4000
    assert gateway.openai.chat.completions.create(model=NAME, messages=words, max_tokens=5)
    room = context - len(replica.prompt_ids(words))
    limits = {"max_output": context}  # put into the request, it must not be what it is refused for
    client = gateway.client(gateway.add_tenant("acme", limits=limits))
    found = client.chat.completions.create(model=NAME, messages=words, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == room
    with pytest.raises(openai.BadRequestError, match=f"needs a context of at least {context + 1} tokens"):
        client.chat.completions.create(model=NAME, messages=words, max_tokens=room + 1)


def test_choices_need_a_context_each_and_not_together(gateway: RunningGateway, replica: Replica) -> None:
    output = replica.model.max_model_len // 2
    found = gateway.openai.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=output, n=3
    )
    assert len(found.choices) == 3


def test_an_anthropic_clients_high_limit_is_cut_and_not_refused(gateway: RunningGateway, replica: Replica) -> None:
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, http_client=Unverified())
    limit = replica.model.max_model_len
    assert client.messages.create(model=NAME, messages=[{"role": "user", "content": "hi"}], max_tokens=limit)


def test_load_is_estimated_by_what_prompts_turned_out_to_have(gateway: RunningGateway, replica: Replica) -> None:
    tokens = gateway.app.pools[NAME].tokens
    assert tokens.estimate(1000) == 1000
    for _ in range(3):
        ask(gateway.openai)
    eventually(lambda: tokens.estimate(1000) < 700)
    assert tokens.estimate(len(LONG)) >= 0.9 * len(replica.prompt_ids(TALK))


def test_a_provider_is_judged_by_an_estimate_that_says_so() -> None:
    with providing() as there, running_gateway(pools={"there": ModelSettings(replicas=[there.url])}) as gateway:
        key = gateway.add_tenant("acme", limits={"max_input": 10})
        with pytest.raises(openai.BadRequestError, match="tokens, judging by earlier ones"):
            gateway.client(key).chat.completions.create(model="there", messages=TALK)


@settings(max_examples=examples(80))
@given(
    st.sampled_from([CHAT, COMPLETION, MESSAGES]),
    st.integers(1, 5),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 300)),
    st.integers(50, 200),
    st.booleans(),
)
def test_what_is_reserved_is_never_less_than_what_can_be_used(
    path: bytes, n: int, prompts: list[int], output: int | None, context: int, is_counted: bool
) -> None:
    """By a replica that makes as much as it may: each choice up to its limit or to the end of the context."""
    pool = Pool(ThreadPoolExecutor(1))
    pool.least_context = pool.most_context = context
    if path != COMPLETION:
        prompts = prompts[:1]
    elif output is None:
        output = 16
    body: dict[str, Any] = {"model": NAME, "n": n, "prompt": [[7] * num for num in prompts]}
    size = Size(pool, path, encoded(body | {"pad": "x" * sum(prompts)}), read(encoded(body)), output, "")
    if is_counted:
        size._is(sum(prompts))
    used = sum(num + n * min(output or context, context - num) for num in prompts)
    assert used <= size.reserved
    assert size.most_used[0] >= sum(prompts)
    assert sum(size.most_used) >= used
    assert size.context_tokens <= context or (output or 0) + 1 > context - max(prompts)


async def test_the_loop_goes_on_while_a_long_prompt_is_counted() -> None:
    tokens = PromptTokens(ThreadPoolExecutor(1))
    tokens.prompt_tokenizer = prompt_tokenizer()
    counting = tokens.count(CHAT, encoded({"model": NAME, "messages": [{"role": "user", "content": LONG * 80}]}), "")
    assert isinstance(counting, asyncio.Future)
    assert tokens.num_counting == 1
    assert await counting > 10_000
    assert tokens.num_counting == 0


def test_a_request_that_no_engine_works_for_reserves_nothing_and_still_has_a_load() -> None:
    body = encoded({"model": NAME, "prompt": LONG})
    with ThreadPoolExecutor(1) as threads:
        size = Size(Pool(threads), b"/tokenize", body, read(body), 0, "")
    assert (size.reserved, size.most, size.most_used, size.is_in_doubt(1)) == (0, 0, (0, 0), False)
    assert size.prompt == 1, "the admission divides by it"


def test_an_estimate_is_cautious_and_follows_what_it_is_told() -> None:
    tokens = PromptTokens(ThreadPoolExecutor(1))
    assert tokens.estimate(1000) == 1000
    for number in range(200):
        tokens.learn(1000, 200 + 10 * (number % 11))
    assert 250 < tokens.estimate(1000) < 350
    tokens.learn(1000, 0)  # an answer that told nothing
    for _ in range(2000):
        tokens.learn(1000, 600)
    assert 590 < tokens.estimate(1000) < 650
