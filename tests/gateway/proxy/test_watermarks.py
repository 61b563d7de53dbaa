"""A tenant's watermark: every answer it gets has it, and nothing that it sends or reads tells it so or changes it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from penstock.core.settings import ServerSettings
from penstock.gateway.settings.gateway import ModelSettings
from penstock.hub.watermarks import WatermarkFile
from tests.gateway.provider import providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica, serving
from tests.waiting import eventually

PROMPT = "tell me"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> WatermarkFile:
    made = WatermarkFile(tmp_path_factory.mktemp("marks") / "watermarks.json")
    made.add("acme")
    return made


@pytest.fixture(scope="module")
def replica(file: WatermarkFile) -> Iterator[Replica]:
    with serving(ServerSettings(watermark_file=str(file.path))) as found:
        yield found


@pytest.fixture(scope="module")
def gateway(replica: Replica) -> Iterator[RunningGateway]:
    with running_gateway(replica) as found:
        yield found
        eventually(found.is_idle)


def ask(gateway: RunningGateway, key: str, **more: object) -> str:
    return (
        gateway.client(key)
        .completions.create(model=NAME, prompt=PROMPT, max_tokens=12, seed=5, extra_body=more)
        .choices[0]
        .text
    )


def streamed(gateway: RunningGateway, key: str) -> str:
    stream = gateway.client(key).completions.create(model=NAME, prompt=PROMPT, max_tokens=12, seed=5, stream=True)
    return "".join(chunk.choices[0].text for chunk in stream)


def test_a_tenants_answers_are_marked_and_others_are_not(
    gateway: RunningGateway, replica: Replica, file: WatermarkFile
) -> None:
    mark = file.find("acme").secret[0] + 1
    marked, plain = gateway.add_tenant("marked", watermark="acme"), gateway.add_tenant("plain")
    assert ask(gateway, marked) == replica.answer(PROMPT, 12, seed=5 + mark)
    assert streamed(gateway, marked) == replica.answer(PROMPT, 12, seed=5 + mark)
    assert ask(gateway, plain) == replica.answer(PROMPT, 12, seed=5)


def test_a_client_can_neither_choose_nor_read_it(
    gateway: RunningGateway, replica: Replica, file: WatermarkFile
) -> None:
    mark = file.find("acme").secret[0] + 1
    marked, plain = gateway.add_tenant("marked", watermark="acme"), gateway.add_tenant("plain")
    for key in (marked, plain):
        with pytest.raises(openai.BadRequestError, match="set by the operator"):
            ask(gateway, key, watermark="acme")
    forged = {"x-penstock-watermark": "acme", "x-penstock-namespace": "marked"}
    for key, seed in ((plain, 5), (marked, 5 + mark)):
        answer = (
            gateway.client(key)
            .with_options(default_headers=forged)
            .completions.with_raw_response.create(model=NAME, prompt=PROMPT, max_tokens=12, seed=5)
        )
        assert answer.parse().choices[0].text == replica.answer(PROMPT, 12, seed=seed)
        assert "acme" not in answer.text + str(answer.headers)


def test_a_change_is_in_force_at_once(gateway: RunningGateway, replica: Replica, file: WatermarkFile) -> None:
    key = gateway.add_tenant("changing", watermark="acme")
    assert ask(gateway, key) != replica.answer(PROMPT, 12, seed=5)
    key = gateway.add_tenant("changing")
    assert ask(gateway, key) == replica.answer(PROMPT, 12, seed=5)


def test_a_server_that_cannot_mark_gets_none_of_its_requests(replica: Replica) -> None:
    with providing() as provider:
        own = f"http://{replica.host}:{replica.port}"
        pools = {NAME: ModelSettings(replicas=[own, provider.url]), "theirs": ModelSettings(replicas=[provider.url])}
        with running_gateway(pools=pools) as gateway:
            marked, plain = gateway.add_tenant("marked", watermark="acme"), gateway.add_tenant("plain")
            answers = {ask(gateway, marked) for _ in range(6)}
            assert len(answers) == 1
            with pytest.raises(openai.InternalServerError, match="no replica of this model"):
                gateway.client(marked).completions.create(model="theirs", prompt=PROMPT, max_tokens=3)
            gateway.client(plain).completions.create(model="theirs", prompt=PROMPT, max_tokens=3)
