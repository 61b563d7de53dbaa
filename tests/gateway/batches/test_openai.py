"""Files and batches with OpenAI's official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.tenancy.store import Store, open_store
from tests.gateway.batches.batching import batching, chat, create, ended, lines, results, upload
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


def test_a_batch_answers_each_row_of_its_file(gateway: RunningGateway, replica_at_hand: Replica) -> None:
    client = gateway.openai
    content = lines([chat("one"), chat("two"), chat("three", max_tokens=-1)])
    batch = create(client, content, metadata={"for": "test"})
    assert (batch.status, batch.output_file_id, batch.metadata) == ("validating", None, {"for": "test"})
    batch = ended(client, batch.id)
    assert (batch.status, batch.endpoint, batch.completion_window) == ("completed", "/v1/chat/completions", "24h")
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    good = results(client, batch.output_file_id)
    said = {row: good[row]["response"]["body"]["choices"][0]["message"]["content"] for row in good}
    asked = {f"row-{n}": [{"role": "user", "content": text}] for n, text in enumerate(("one", "two"), 1)}
    assert said == {row: replica_at_hand.answer(messages, 6) for row, messages in asked.items()}
    bad = results(client, batch.error_file_id)
    assert (bad["row-3"]["response"]["status_code"], bad["row-3"]["error"]) == (400, None)
    assert bad["row-3"]["response"]["body"]["error"]["param"] == "max_tokens"
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert sorted(times) == list(times)  # type: ignore[type-var]


def test_files_are_listed_shown_read_and_deleted(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("files"))
    content = lines([chat()] * 3)
    ids = [upload(client, content) for _ in range(3)]
    shown = client.files.retrieve(ids[0])
    assert (shown.bytes, shown.filename, shown.purpose, shown.status) == (
        len(content),
        "rows.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(ids[0]).content == content
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", purpose="batch")] == ids
    assert client.files.delete(ids[0]).deleted
    for refused in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError) as missing:
            refused(ids[0])
        assert missing.value.code == "file_not_found"
