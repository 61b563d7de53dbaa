"""Requests that fail by what is in them: whom they cost what, and whom they do not."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.request_log import RequestLog
from penstock.gateway.settings.gateway import ModelSettings
from tests.gateway.provider import Provider, providing
from tests.gateway.running import RunningGateway, running_gateway
from tests.waiting import eventually

NAME = "m"


@pytest.fixture
def providers() -> Iterator[list[Provider]]:
    with providing(hates="hostile") as one, providing(hates="hostile") as two:
        yield [one, two]


@pytest.fixture
def gateway(providers: list[Provider]) -> Iterator[RunningGateway]:
    with running_gateway(pools={NAME: ModelSettings(replicas=[one.url for one in providers])}) as found:
        yield found
        eventually(found.is_idle)


def status(client: openai.OpenAI, text: str, model: str = NAME) -> int:
    message: Any = {"role": "user", "content": text}
    try:
        client.chat.completions.create(model=model, messages=[message], max_tokens=5)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def breakers(gateway: RunningGateway) -> set[str]:
    return {str(replica.breaker.state(gateway.app.now())) for replica in gateway.app.replicas.values()}


def test_one_tenants_failures_close_no_replica_to_others(gateway: RunningGateway) -> None:
    attacker, other = gateway.client(gateway.add_tenant("attacker")), gateway.client(gateway.add_tenant("other"))
    assert {status(attacker, f"hostile {number}") for number in range(25)} == {500}
    assert {status(other, f"harmless {number}") for number in range(10)} == {200}
    assert breakers(gateway) == {"closed"}


def test_a_replica_that_fails_whatever_is_asked_is_found_with_one_tenant_only(
    gateway: RunningGateway, providers: list[Provider]
) -> None:
    client = gateway.client(gateway.add_tenant("only"))
    providers[0].status = 500
    assert {status(client, f"harmless {number}") for number in range(30)} == {200}
    eventually(lambda: breakers(gateway), lambda found: found == {"closed", "open"})


def test_before_there_are_tenants_requests_of_two_kinds_are_asked_for(
    gateway: RunningGateway, providers: list[Provider]
) -> None:
    assert {status(gateway.openai, "hostile") for _ in range(15)} == {500}
    assert breakers(gateway) == {"closed"}
    for one in providers:
        one.status = 500
    for number in range(30):
        status(gateway.openai, f"harmless {number}")
    assert breakers(gateway) == {"open"}


@pytest.mark.parametrize(("wrong", "model"), [("hostile", NAME), ("harmless", "no-such-model"), ("x" * 20_000, "none")])
def test_a_request_that_is_refused_has_cost_one(
    gateway: RunningGateway, providers: list[Provider], wrong: str, model: str
) -> None:
    for one in providers:
        one.hates_status = 400
    client = gateway.client(gateway.add_tenant("acme", limits={"requests_per_minute": 3}))
    assert status(client, wrong, model) in (400, 404)
    assert status(client, wrong, model) in (400, 404)
    eventually(gateway.is_idle)
    assert status(client, "harmless") == 200
    eventually(gateway.is_idle)
    assert status(client, "harmless") == 429


def test_a_large_body_is_not_read_for_a_tenant_without_requests_left(
    gateway: RunningGateway, providers: list[Provider]
) -> None:
    client = gateway.client(gateway.add_tenant("acme", limits={"requests_per_minute": 1}))
    assert status(client, "harmless") == 200
    eventually(gateway.is_idle)
    assert status(client, "x" * 20_000, "no-such-model") == 429  # nobody has seen for which model it is


def test_a_refusal_is_logged_with_its_tenant(providers: list[Provider]) -> None:
    written = io.StringIO()
    logger = logging.Logger("lines", logging.INFO)
    logger.addHandler(logging.StreamHandler(written))
    pools = {NAME: ModelSettings(replicas=[one.url for one in providers])}
    with RequestLog(logger) as log, running_gateway(pools=pools, recorder=GatewayRecorder(log)) as gateway:
        assert status(gateway.client(gateway.add_tenant("acme")), "harmless", "no-such-model") == 404
    assert "tenant=acme" in written.getvalue()
    assert "reason=model_not_found" in written.getvalue()
