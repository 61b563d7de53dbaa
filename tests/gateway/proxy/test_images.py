"""Images through a gateway: counted by their headers, routed by what they are, carried on when a replica is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.replica import UNBOUNDED
from penstock.gateway.tokens.prompt_tokenizer import CHAT, MESSAGES, RESPONSES, PromptTokenizer
from penstock.router.load import Load
from penstock.router.strategies import RoutingSettings, Weights
from tests.gateway.running import RunningGateway, running_gateway, slow_and_fast
from tests.images.samples import data_url, encoded, noise
from tests.server.replica import NAME, Replica
from tests.server.seeing import seeing
from tests.waiting import eventually

BY_PREFIX = RoutingSettings(weights=Weights(load=Load(queue=0.0, kv_pressure=0.0, output=0.0)))
IMAGES = [data_url(encoded(noise(160, 144, seed))) for seed in range(3)]  # 360 tokens each


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    with seeing(routing_tokens=ROUTING_TOKENS) as one, seeing(routing_tokens=ROUTING_TOKENS) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def gateway(replicas: list[Replica]) -> Iterator[RunningGateway]:
    with running_gateway(*replicas) as found:
        eventually(lambda: found.app.pools[NAME].tokens.prompt_tokenizer is not None)
        yield found
        eventually(found.is_idle)


def words(gateway: RunningGateway) -> PromptTokenizer:
    found = gateway.app.pools[NAME].tokens.prompt_tokenizer
    assert found is not None
    return found


def messages(*urls: str, text: str = "What is it?") -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def ask(gateway: RunningGateway, *urls: str, text: str = "What is it?", client: Any = None, **fields: Any) -> Any:
    return (client or gateway.openai).chat.completions.create(
        model=NAME, messages=messages(*urls, text=text), max_tokens=4, temperature=0, **fields
    )


def test_a_prompt_is_counted_as_its_replica_counts_it(gateway: RunningGateway) -> None:
    for urls in (IMAGES[:1], IMAGES[:2], [IMAGES[0]] * 2):
        answer = ask(gateway, *urls)
        body = json.dumps({"model": NAME, "messages": messages(*urls)}).encode()
        assert words(gateway).count(CHAT, body) == answer.usage.prompt_tokens
        assert words(gateway).names(CHAT, body, "").num_tokens == answer.usage.prompt_tokens
        assert words(gateway).bound(body) == UNBOUNDED
        assert answer.usage.prompt_tokens_details.image_tokens == 360 * len(urls)


def test_every_api_says_the_same_of_the_same_image(gateway: RunningGateway) -> None:
    data = IMAGES[0].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    text = {"type": "text", "text": "What is it?"}
    anthropic = [{"role": "user", "content": [{"type": "image", "source": source}, text]}]
    item = {"role": "user", "content": [{"type": "input_image", "image_url": IMAGES[0]}, text | {"type": "input_text"}]}
    bodies: list[tuple[bytes, dict[str, Any]]] = [
        (CHAT, {"messages": messages(IMAGES[0])}),
        (MESSAGES, {"messages": anthropic, "max_tokens": 1}),
        (RESPONSES, {"input": [item]}),
    ]
    named = {words(gateway).names(path, json.dumps({"model": NAME} | body).encode(), "t") for path, body in bodies}
    assert len(named) == 1


def test_blocks_have_the_names_that_the_replica_has_for_them(gateway: RunningGateway, replicas: list[Replica]) -> None:
    body = json.dumps({"model": NAME, "messages": messages(IMAGES[2], IMAGES[1])}).encode()
    named = words(gateway).names(CHAT, body, "")
    assert len(named.hashes) == 722 // ROUTING_TOKENS
    assert not named.ids  # its replica needs the images themselves
    ask(gateway, IMAGES[2], IMAGES[1])
    held = [replica.engine.cache.hashes for replica in replicas]
    eventually(lambda: any(set(named.hashes) <= set(one) for one in held))


def test_the_same_image_goes_to_the_replica_that_holds_it(replicas: list[Replica]) -> None:
    urls = [data_url(encoded(noise(160, 144, seed))) for seed in (77, 78)]
    with running_gateway(*replicas) as gateway:
        router = gateway.app.admission.router
        gateway.call(lambda: router.configure(BY_PREFIX, {}))
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        body = json.dumps({"model": NAME, "messages": messages(urls[0])}).encode()
        hashes = words(gateway).names(CHAT, body, "").hashes
        assert ask(gateway, urls[0]).usage.prompt_tokens_details.cached_tokens < 20
        eventually(lambda: any(set(hashes) <= set(replica.engine.cache.hashes) for replica in replicas))
        eventually(lambda: gateway.call(lambda: router.index.holders(hashes, 2)))
        for number in range(4):
            eventually(gateway.is_idle)
            again = ask(gateway, urls[0], text=f"And in words of {number}?")
            assert again.usage.prompt_tokens_details.cached_tokens >= ROUTING_TOKENS
        assert ask(gateway, urls[1]).usage.prompt_tokens_details.cached_tokens < 20
        assert sum(set(hashes) <= set(replica.engine.cache.hashes) for replica in replicas) == 1


def test_limits_of_tenants_count_tokens_of_images(replicas: list[Replica]) -> None:
    with running_gateway(*replicas) as gateway:
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        client = gateway.client(gateway.add_tenant("small", limits={"max_input": 300}))
        with pytest.raises(openai.BadRequestError, match=r"the prompt has 3[67][0-9] tokens"):
            ask(gateway, IMAGES[0], client=client)
        small = ask(gateway, data_url(encoded(noise(64, 64))), client=client)  # of more bytes than tokens are allowed
        assert small.usage.prompt_tokens_details.image_tokens == 64


def test_hostile_images_end_at_the_gateway(gateway: RunningGateway) -> None:
    for url, problem in (
        ("data:image/png;base64,%%", "base64"),
        (data_url(b"<html>"), "no image of a kind"),
        ("ftp://images.example/", "neither a data: URL"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            ask(gateway, url)
        assert refused.value.param == "messages[0].content[0].image_url"
    with pytest.raises(openai.BadRequestError, match="fetches no images"):  # which its replica says
        ask(gateway, "https://images.example/a.png")


def test_an_image_that_only_its_replica_sees_ends_what_can_be_named(gateway: RunningGateway) -> None:
    body = json.dumps({"model": NAME, "messages": messages(IMAGES[0], "https://a.example/b.png", IMAGES[1])}).encode()
    named = words(gateway).names(CHAT, body, "")
    known = words(gateway).names(CHAT, json.dumps({"model": NAME, "messages": messages(IMAGES[0])}).encode(), "")
    assert named.hashes == known.hashes[: len(named.hashes)]
    assert len(named.hashes) == 1
    assert named.num_tokens > 2 * 360


def test_a_model_that_takes_no_images_is_named_at_the_gateway(replica_at_hand: Replica) -> None:
    with running_gateway(replica_at_hand) as blind:
        eventually(lambda: blind.app.pools[NAME].tokens.prompt_tokenizer is not None)
        with pytest.raises(openai.BadRequestError, match="takes no images") as refused:
            ask(blind, IMAGES[0])
        assert refused.value.code == "unsupported_parameter"


def test_a_stream_about_an_image_goes_on_at_another_replica() -> None:
    with slow_and_fast(begin=seeing, chunk_tokens=2048) as (gateway, slow, fast):
        eventually(lambda: gateway.app.pools[NAME].tokens.prompt_tokenizer is not None)
        asked: Any = {"model": NAME, "messages": messages(IMAGES[0]), "max_tokens": 60, "temperature": 1, "seed": 3}
        whole = fast.openai.chat.completions.create(**asked).choices[0].message.content
        other = fast.openai.chat.completions.create(**asked | {"messages": messages(IMAGES[1])})
        assert whole != other.choices[0].message.content
        text, usage = "", None
        chunks = gateway.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for number, chunk in enumerate(chunks):
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            usage = chunk.usage or usage
            if number == 3:
                gateway.set_in_use(fast, True)
                slow.kill_engine()
        assert text == whole
        assert usage.prompt_tokens_details.image_tokens == 360
        assert "streams_carried_on_total" in gateway.metrics()
