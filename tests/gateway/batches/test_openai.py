"""Files and batches with OpenAI's official client."""

from __future__ import annotations

from collections.abc import Iterator
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


def test_what_is_wrong_with_the_input_is_told_by_its_line(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("wrong"))
    row = lines([chat()]).strip()
    rows = [
        row,
        b"{not json",
        row,
        row.replace(b"row-1", b"row-4").replace(b"/v1/chat/completions", b"/v1/completions"),
        b"",
        row.replace(b"row-1", b"row-6").replace(b'"small"', b'"large"'),
        lines([chat(stream=True)]).replace(b"row-1", b"row-7").strip(),
        b'{"custom_id": "row-8", "method": "POST", "url": "/v1/chat/completions", "body": []}',
    ]
    batch = ended(client, create(client, b"\n".join(rows)).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(one.line, one.code, one.param) for one in batch.errors.data or ()] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "mismatched_endpoint", "url"),
        (7, "unsupported_parameter", "stream"),
        (8, "invalid_request", "body"),
    ]
    batch = ended(client, create(client, b"\n".join((row, rows[5]))).id)
    assert batch.errors is not None
    assert [(one.line, one.code) for one in batch.errors.data or ()] == [(2, "model_not_found")]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "24 hours"}, "completion_window"),
        ({"completion_window": "1000h"}, "completion_window"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_by_the_name_of_what_is_wrong(
    gateway: RunningGateway, wrong: Any, param: str
) -> None:
    client = gateway.client(gateway.add_tenant("refused"))
    asked: Any = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as refused:
        client.batches.create(**asked | wrong)
    assert str(refused.value.param).startswith(param)


def test_tenants_see_their_own_files_and_batches_alone(gateway: RunningGateway) -> None:
    one, other = (gateway.client(gateway.add_tenant(name)) for name in ("one", "other"))
    batch = ended(one, create(one, lines([chat()])).id)
    assert batch.output_file_id is not None
    for file_id in (batch.input_file_id, batch.output_file_id):
        with pytest.raises(openai.NotFoundError):
            other.files.content(file_id)
        with pytest.raises(openai.NotFoundError):
            other.files.delete(file_id)
    for refused in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            refused(batch.id)
        assert missing.value.code == "batch_not_found"
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
    assert [list(other.files.list()), list(other.batches.list())] == [[], []]
    assert [found.id for found in one.batches.list()] == [batch.id]
    with pytest.raises(openai.AuthenticationError):
        gateway.client("psk_nobody").files.list()
    with pytest.raises(openai.AuthenticationError):
        upload(gateway.client("psk_nobody"), b"{}")


def test_a_cancelled_batch_keeps_what_was_answered_and_tells_the_rest(
    gateway: RunningGateway, replica_at_hand: Replica
) -> None:
    client = gateway.client(gateway.add_tenant("cancels"))
    gateway.set_in_use(replica_at_hand, False)  # rows wait for room
    try:
        batch = create(client, lines([chat()] * 3))
        eventually(lambda: client.batches.retrieve(batch.id).status, lambda status: status == "in_progress")
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        found = ended(client, batch.id)
    finally:
        gateway.set_in_use(replica_at_hand, True)
    assert (found.status, found.output_file_id) == ("cancelled", None)
    told = results(client, found.error_file_id)
    assert {row["error"]["code"] for row in told.values()} == {"batch_cancelled"}
    assert sorted(told) == ["row-1", "row-2", "row-3"]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def test_rows_of_other_endpoints_are_answered_by_them(gateway: RunningGateway) -> None:
    client = gateway.client(gateway.add_tenant("endpoints"))
    texts = lines([{"model": NAME, "prompt": "hello", "max_tokens": 3}], "/v1/completions")
    batch = ended(client, create(client, texts, "/v1/completions").id)
    body = results(client, batch.output_file_id)["row-1"]["response"]["body"]
    assert (body["object"], body["usage"]["completion_tokens"]) == ("text_completion", 3)
    asked = lines([{"model": NAME, "input": "hello", "max_output_tokens": 3}], "/v1/responses")
    batch = ended(client, create(client, asked, "/v1/responses").id)
    body = results(client, batch.output_file_id)["row-1"]["response"]["body"]
    assert client.responses.retrieve(body["id"]).id == body["id"]
