"""Responses from servers of other kinds, which are asked to chat, through a gateway that keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.gateway.settings.gateway import ModelSettings
from penstock.tenancy.store import open_store
from tests.gateway.provider import Provider, providing
from tests.gateway.responses.test_service import frozen, keeping
from tests.gateway.running import RunningGateway
from tests.waiting import eventually


@pytest.fixture
def provider() -> Iterator[Provider]:
    with providing(says="hello there") as found:
        yield found


@pytest.fixture
def gateway(tmp_path: Path, provider: Provider) -> Iterator[RunningGateway]:
    pools = {"other": ModelSettings(replicas=[provider.url], dialect="openai")}
    with (
        open_store(f"sqlite:///{tmp_path / 'penstock.db'}") as store,
        keeping(frozen(store), pools=pools) as found,
    ):
        yield found


def test_a_server_that_only_chats_answers_with_responses(gateway: RunningGateway, provider: Provider) -> None:
    client = gateway.openai
    first = client.responses.create(model="other", input="Hi.", max_output_tokens=5)
    assert (first.output_text, first.status, first.store) == ("hello there", "completed", True)  # type: ignore[attr-defined]
    events = list(client.responses.create(model="other", input="And?", previous_response_id=first.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert (final.type, final.response.output_text) == ("response.completed", "hello there")
    assert provider.asked[-1]["messages"] == [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "hello there"},
        {"role": "user", "content": "And?"},
    ]
    assert client.responses.retrieve(final.response.id).output_text == "hello there"
    eventually(gateway.is_idle)
    billed = [(usage.input_tokens, usage.output_tokens) for usage in gateway.ledger.usages]
    assert billed == [(3, 1), (3, 1)]


def test_its_errors_are_passed_on_as_it_told_them(gateway: RunningGateway, provider: Provider) -> None:
    provider.status, provider.error = 400, "no such thing"
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no such thing"):
            gateway.openai.responses.create(model="other", input="Hi.", stream=is_stream)


def test_a_response_in_the_background_may_be_another_servers(gateway: RunningGateway, provider: Provider) -> None:
    client = gateway.openai
    queued = client.responses.create(model="other", input="Hi.", background=True)
    found = eventually(lambda: client.responses.retrieve(queued.id), lambda one: one.status != "in_progress")
    assert (found.status, found.output_text) == ("completed", "hello there")
    provider.status = 400
    queued = client.responses.create(model="other", input="Hi.", background=True)
    found = eventually(lambda: client.responses.retrieve(queued.id), lambda one: one.status != "in_progress")
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "invalid_prompt")


def test_what_it_cannot_do_is_refused_by_name(gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gateway.openai.responses.create(model="other", input="Hi.", truncation="auto")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "truncation")
