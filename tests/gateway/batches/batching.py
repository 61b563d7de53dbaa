"""A gateway that runs batches, in front of replicas that are real but for the model."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from penstock.gateway.app import Gateway
from penstock.gateway.batches.object_store import DirectoryStore, ObjectStore
from penstock.gateway.batches.service import BatchService
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.responses.service import ResponseService
from penstock.gateway.responses.settings import ResponseSettings
from penstock.http.server import Server
from penstock.tenancy.store import Store
from tests.gateway.running import RunningGateway, running_gateway
from tests.server.replica import NAME, Replica
from tests.waiting import eventually

CHAT = "/v1/chat/completions"


@contextlib.contextmanager
def batching(
    store: Store,
    objects: ObjectStore | Path | None,
    *replicas: Replica,
    settings: BatchSettings | None = None,
    wall: Callable[[], float] | None = None,
    **options: Any,
) -> Iterator[RunningGateway]:
    """`wall`: the store's time; None: the real one."""
    place = DirectoryStore(objects) if isinstance(objects, Path) else objects
    made: list[BatchService] = []

    def make(routes: Any, services: Any, *arguments: Any, clock: Any, **more: Any) -> Gateway:
        batches = BatchService(
            store.files,
            store.batches,
            settings or BatchSettings(),
            place,
            clock,
            lambda head: services.caller(head.headers),
            wall=wall or store._clock,
        )
        made.append(batches)
        responses = ResponseService(store.responses, ResponseSettings(), clock)
        return Gateway(routes, services, *arguments, clock=clock, responses=responses, batches=batches, **more)

    def serve(*arguments: Any, **more: Any) -> Server:
        return Server(*arguments, uploads=made[0], **more)

    with running_gateway(*replicas, make=make, serve=serve, **options) as gateway:
        yield gateway


def chat(text: str = "hello", **body: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": said, "max_tokens": 6, "temperature": 0, **body}


def lines(bodies: list[dict[str, Any]], url: str = CHAT) -> bytes:
    rows = [{"custom_id": f"row-{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies, 1)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch").id


def create(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **options: Any) -> Batch:
    file_id = upload(client, content)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **options)


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    ends = ("completed", "failed", "expired", "cancelled")
    return eventually(lambda: client.batches.retrieve(batch_id), lambda found: found.status in ends)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Rows of a file by their custom_id."""
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {row["custom_id"]: row for row in found}
    assert len(by_id) == len(found)
    return by_id
