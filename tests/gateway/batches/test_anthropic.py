"""Batches of messages with Anthropic's official client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from penstock.tenancy.store import Store, open_store
from tests.gateway.batches.batching import batching
from tests.gateway.running import RunningGateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'penstock.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(
    store: Store, replica_at_hand: Replica, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    with batching(store, tmp_path_factory.mktemp("files") / "files", replica_at_hand) as found:
        yield found
        eventually(found.is_idle)


def client_of(gateway: RunningGateway, tenant: str) -> anthropic.Anthropic:
    key = gateway.add_tenant(tenant)
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0)


def request(custom_id: str, text: str = "hello", **params: Any) -> Any:
    said = [{"role": "user", "content": text}]
    return {"custom_id": custom_id, "params": {"model": NAME, "max_tokens": 6, "messages": said, **params}}


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    return eventually(lambda: client.messages.batches.retrieve(batch_id), lambda one: one.processing_status == "ended")


def test_a_batch_of_messages_is_answered(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = client_of(gateway, "messages")
    asked = [request("one", "first\nline", temperature=0), request("two", max_tokens=-1)]
    batch = client.messages.batches.create(requests=asked)
    assert (batch.processing_status, batch.request_counts.processing, batch.results_url) == ("in_progress", 2, None)
    batch = ended(client, batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 1, 1)
    assert batch.ended_at is not None
    found = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    said = [{"role": "user", "content": "first\nline"}]
    assert found["one"].type == "succeeded"
    assert found["one"].message.content[0].text == replica_at_hand.answer(said, 6)  # type: ignore[union-attr]
    assert found["two"].type == "errored"
    assert found["two"].error.error.type == "invalid_request_error"


def test_batches_of_messages_are_listed_cancelled_and_deleted(
    gateway: RunningGateway, replica_at_hand: Replica
) -> None:
    client, other = client_of(gateway, "lists"), client_of(gateway, "another")
    gateway.set_in_use(replica_at_hand, False)
    try:
        ids = [client.messages.batches.create(requests=[request(f"r{n}")]).id for n in range(3)]
        with pytest.raises(anthropic.ConflictError):
            client.messages.batches.delete(ids[0])
        with pytest.raises(anthropic.NotFoundError):
            other.messages.batches.cancel(ids[0])
        for batch_id in ids:
            cancelled = client.messages.batches.cancel(batch_id)
            assert (cancelled.processing_status, cancelled.cancel_initiated_at is None) == ("canceling", False)
        told = [ended(client, batch_id).request_counts for batch_id in ids]
    finally:
        gateway.set_in_use(replica_at_hand, True)
    assert [one.canceled for one in told] == [1, 1, 1]
    assert [one.result.type for one in client.messages.batches.results(ids[1])] == ["canceled"]
    assert [one.id for one in client.messages.batches.list(limit=2)] == ids[::-1]
    assert [one.id for one in client.messages.batches.list(before_id=ids[0], limit=1).data] == [ids[1]]
    assert client.messages.batches.delete(ids[0]).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(ids[0])
    assert list(other.messages.batches.list()) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "breaks off"),
        (b"{}", "breaks off"),
        (b'{"requests": []}', "at least one"),
        (b'{"requests": [1]}', "list of objects"),
        (b'{"requests": [{"custom_id": "a b", "params": {}}]}', "requests.0"),
        (b'{"requests": [{"custom_id": "a"}]}', "requests.0"),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "small", "stream": true}}]}', "stream"),
        (
            b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}, {"custom_id": "a", '
            b'"params": {"model": "m"}}]}',
            "twice",
        ),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}], "x": 1}', "another member"),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}]}{}', "follows"),
        (b'{"requests": [{"custom_id": "a", "params": {"model": "m"}}', "breaks off"),
    ],
)
def test_a_body_that_is_no_batch_is_refused(gateway: RunningGateway, body: bytes, told: str) -> None:
    key = gateway.add_tenant("wrong")
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("POST", "/v1/messages/batches", body, {"x-api-key": key, "content-type": "application/json"})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    assert (answer.status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told in said["error"]["message"]
