"""Uploads and rows that are wrong, large or meant to do harm: each has an answer, and nothing of them stays."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from penstock.gateway.batches.settings import BatchSettings
from penstock.tenancy.store import Store, open_store
from tests.gateway.batches.batching import batching, chat, create, ended, lines, results, upload
from tests.gateway.running import RunningGateway
from tests.server.replica import Replica
from tests.waiting import eventually

MAX_BYTES = 12 << 20
PART = b'--x\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path_factory.mktemp('store') / 'penstock.db'}") as opened:
        yield opened


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def gateway(store: Store, files: Path, replica_at_hand: Replica) -> Iterator[RunningGateway]:
    settings = BatchSettings(max_file_bytes=MAX_BYTES, max_rows=1000)
    with batching(store, files, replica_at_hand, settings=settings) as found:
        yield found
        eventually(found.is_idle)


def objects(files: Path) -> int:
    return sum(path.is_file() for path in files.rglob("*"))


def post(gateway: RunningGateway, body: bytes, content_type: str, path: str = "/v1/files") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("POST", path, body, {"content-type": content_type})
    answer = connection.getresponse()
    said = json.loads(answer.read())
    connection.close()
    return answer.status, said["error"]["code"]


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "multipart/form-data; boundary=x"),
        (b"{}", "application/json"),
        (b"\x00" * 100_000, "multipart/form-data; boundary=x"),
        (b"--x\r\n" * 10_000, "multipart/form-data; boundary=x"),
        (PART % b"purpose" + b"batch\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (PART % b"file" + b"{}\r\n--x--\r\n", "multipart/form-data; boundary=x"),
    ],
)
def test_what_is_no_form_with_a_file_is_refused(
    gateway: RunningGateway, files: Path, body: bytes, content_type: str
) -> None:
    before = objects(files)
    assert post(gateway, body, content_type) == (400, "invalid_request")
    eventually(lambda: objects(files), lambda count: count == before)


def test_other_purposes_and_fields_are_refused_by_name(gateway: RunningGateway, files: Path) -> None:
    before, client = objects(files), gateway.openai
    file = io.BytesIO(b"x" * (5 << 20))
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=file, purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=file, purpose="batch", extra_body={"colour": "red"})
    assert refused.value.param == "colour"
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(file=file, purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    assert refused.value.param == "expires_after[seconds]"
    assert objects(files) == before


def test_the_name_of_a_file_leads_nowhere(gateway: RunningGateway) -> None:
    asked = {"anchor": "created_at", "seconds": 3600}
    found = gateway.openai.files.create(
        file=("../../etc/pass\x07wd", io.BytesIO(b"x")),
        purpose="batch",
        expires_after=asked,  # type: ignore[arg-type]
    )
    assert found.filename == "pass%07wd"  # as this client writes it
    assert (found.expires_at or 0) - found.created_at == 3600


def test_a_client_that_leaves_in_the_middle_of_an_upload_leaves_nothing(gateway: RunningGateway, files: Path) -> None:
    before = objects(files)
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("content-type", "multipart/form-data; boundary=x")
    connection.putheader("content-length", str(MAX_BYTES))
    connection.endheaders()
    connection.send(PART % b"file" + b"x" * (9 << 20))
    eventually(lambda: objects(files), lambda count: count > before)
    connection.close()
    eventually(lambda: objects(files), lambda count: count == before)


def test_a_file_of_several_chunks_is_read_as_it_was_written(gateway: RunningGateway) -> None:
    content = bytes(range(256)) * (40 << 10)
    assert gateway.openai.files.content(upload(gateway.openai, content)).content == content


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"\xff\xfe\x00", "invalid_json_line"),
        (b"[" * 100_000, "invalid_request"),
        (b'{"custom_id": "x", "body": ' + b"[" * 100_000, "invalid_json_line"),
        (b'{"custom_id": "' + b"x" * 600 + b'", "method": "POST", "url": "/", "body": {}}', "invalid_request"),
        (b'{"custom_id": 7, "method": "POST", "url": "/", "body": {}}', "invalid_request"),
        (b'"' + b"x" * (9 << 20) + b'"', "line_too_long"),
        (b"{}\n" * 150, "invalid_request"),
        (b'{"x": 1}\r\n' * 1001, "invalid_request"),
        (b"\n \n", "empty_file"),
    ],
)
def test_a_file_of_bad_lines_fails_and_says_where(gateway: RunningGateway, line: bytes, code: str) -> None:
    batch = ended(gateway.openai, create(gateway.openai, line).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    errors = batch.errors.data or []
    assert {one.code for one in errors} == {code}
    assert len(errors) <= 100


def test_rows_that_no_replica_can_answer_fail_by_themselves(gateway: RunningGateway) -> None:
    deep = json.loads("[" * 200 + "]" * 200)
    bodies = [chat("\x00"), chat(), chat(messages=[]), chat(colour=deep), chat(n=1000), chat("x " * 10_000)]
    batch = ended(gateway.openai, create(gateway.openai, lines(bodies)).id)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == len(bodies)
    told = results(gateway.openai, batch.error_file_id)
    assert {row["response"]["status_code"] for row in told.values()} <= {400, 404, 422}
    assert "row-2" in results(gateway.openai, batch.output_file_id)


@pytest.mark.parametrize("path", ["/v1/files/%00", "/v1/files/" + "x" * 500, "/v1/files/a/b/c", "/v1/batches/x/y"])
def test_paths_that_do_not_exist(gateway: RunningGateway, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    connection.request("GET", path)
    assert connection.getresponse().status == 404
    connection.close()
