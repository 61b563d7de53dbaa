"""The service of files and batches at a gateway: their endpoints, and the runner behind them.

`BatchService` is asked in the event loop and answers later, from tasks of its own; what blocks is done in threads.
Where no store of files is set, each of its endpoints says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import parse_qsl
from uuid import uuid4

from penstock.api import batches as wire
from penstock.core.config import shown
from penstock.core.errors import (
    BatchNotFound,
    FileNotFound,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PenstockError,
)
from penstock.gateway.batches.file_store import FileStore
from penstock.gateway.batches.object_store import ObjectStore
from penstock.gateway.batches.runner import BatchRunner, RowGate
from penstock.gateway.batches.settings import BatchSettings
from penstock.gateway.batches.streaming import ClientStream
from penstock.gateway.batches.uploads import FileUpload, MessagesUpload
from penstock.gateway.batches.views import batch_view, file_view, list_view, message_batch_view
from penstock.http.clock import TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import Request, render
from penstock.http.uploads import Upload
from penstock.observe import gateway_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Labels
from penstock.tenancy.batches import BatchBook, BatchFacts, StoredBatch
from penstock.tenancy.files import FileBook, StoredFile
from penstock.tenancy.keys import Caller

FILES, BATCHES, MESSAGE_BATCHES = "/v1/files", "/v1/batches", "/v1/messages/batches"
_ROOTS = (FILES, BATCHES, MESSAGE_BATCHES)
_MAX_PENDING = 256  # requests
_MAX_ID = 128
_OPENAI, _ANTHROPIC = "openai", "anthropic"
_PURPOSES = ("batch", "batch_output")  # of files that are shown
_MESSAGES_WINDOW_S = 86400.0

Refuse = Callable[[PenstockError], None]

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A request for one of the endpoints."""

    exchange: Exchange
    headers: bytes  # of the answer
    caller: Caller

    @property
    def tenant_id(self) -> str:
        return self.caller.tenant.id

    @property
    def query(self) -> list[tuple[str, str]]:
        return parse_qsl(self.exchange.request.query.decode(errors="replace"), keep_blank_values=True)


class BatchService:
    paths = frozenset((FILES.encode(), MESSAGE_BATCHES.encode()))  # whose bodies are taken piece by piece

    def __init__(
        self,
        files: FileBook,
        batches: BatchBook,
        settings: BatchSettings,
        objects: ObjectStore | None,
        clock: TimerClock,
        caller: Callable[[Request], Caller],
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`objects`: None: nothing is kept, and all is refused; `caller`: raises for a request that has no good key;
        `wall`: the time of the store."""
        self._book = batches
        self._settings = settings
        self._files = FileStore(files, objects, settings) if objects is not None else None
        self._caller = caller
        self._tasks: set[asyncio.Task[None]] = set()
        self.runner = BatchRunner(batches, self._files, settings, clock, wall) if self._files is not None else None

    @property
    def busy(self) -> float:
        return self._settings.busy

    def counts(self) -> dict[Metric, dict[Labels, float]]:
        """Counts of batches for the metrics."""
        runner = self.runner
        if runner is None:
            return {}
        in_flight = runner.slots.in_flight if runner.slots is not None else {}
        return {
            catalog.BATCHES: {(status,): count for status, count in runner.ended.items()},
            catalog.BATCHES_RUNNING: {(): runner.num_running},
            catalog.BATCH_ROWS: {(outcome,): count for outcome, count in runner.rows.items()},
            catalog.BATCH_ROWS_IN_FLIGHT: {(pool,): count for pool, count in in_flight.items() if pool},
            catalog.BATCH_RETRIES: {(): runner.num_retries},
        }

    def start(self, gate: RowGate) -> None:
        if self.runner is not None:
            self.runner.start(gate)

    def close(self) -> None:
        """Blocks until what is answered is written."""
        for task in list(self._tasks):
            task.cancel()
        if self.runner is not None and self._files is not None:
            self.runner.close()
            self._files.close()

    # -- bodies

    def open(self, head: Request, resume: Callable[[], None]) -> Upload:
        """An upload that begins: as `http.uploads.Uploads`."""
        tenant_id = self._caller(head).tenant.id
        if head.path == MESSAGE_BATCHES.encode():
            return MessagesUpload(self._store, tenant_id, resume)
        return FileUpload(self._store, tenant_id, head.headers.get(b"content-type", b""), resume)

    @staticmethod
    def owns(path: bytes) -> bool:
        text = path.decode(errors="replace")
        return any(text == root or text.startswith(f"{root}/") for root in _ROOTS)

    @property
    def _store(self) -> FileStore:
        if self._files is None:
            raise NotFound(
                "this gateway keeps no files, and runs no batches: its operator has set no place for them "
                "(batches.files)"
            )
        return self._files

    # -- requests

    def show(self, exchange: Exchange, headers: bytes, caller: Caller, refuse: Refuse) -> None:
        """Answers a request for one of the endpoints. `refuse` is told what is wrong, later; raises it at once."""
        _ = self._store
        if len(self._tasks) >= _MAX_PENDING:
            raise Overloaded("too many requests wait for the store of files", reason="store", retry_after_s=1.0)
        work = self._answer(Asked(exchange, headers, caller), refuse)
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: Asked, refuse: Refuse) -> None:
        try:
            body = await self._find(asked)
        except PenstockError as error:
            _refuse(asked.exchange, error, refuse)
        except Exception:
            log.exception("a request for files or batches failed")
            _refuse(asked.exchange, PenstockError("internal error"), refuse)
        else:
            if body is not None and asked.exchange.is_open:
                asked.exchange.respond(200, asked.headers, body)

    def _find(self, asked: Asked) -> Coroutine[Any, Any, bytes | None]:
        """The answer to this path and method; None: it was given already."""
        request = asked.exchange.request
        path, method = request.path.decode(errors="replace"), request.method.decode()
        root = next(one for one in _ROOTS if path == one or path.startswith(f"{one}/"))
        id_, *rest = path.removeprefix(root).removeprefix("/").split("/")
        if len(id_) > _MAX_ID or not id_.isprintable():
            raise NotFound(f"no such path: {shown(path)}")
        ways: dict[tuple[str, ...], dict[str, Callable[[], Coroutine[Any, Any, bytes | None]]]]
        if root == FILES:
            ways = {
                (): {"GET": lambda: self._list_files(asked), "POST": lambda: self._upload(asked)},
                ("id",): {"GET": lambda: self._show_file(asked, id_), "DELETE": lambda: self._delete_file(asked, id_)},
                ("id", "content"): {"GET": lambda: self._content(asked, id_)},
            }
        elif root == BATCHES:
            ways = {
                (): {"GET": lambda: self._list_batches(asked), "POST": lambda: self._create(asked)},
                ("id",): {"GET": lambda: self._show_batch(asked, id_, _OPENAI)},
                ("id", "cancel"): {"POST": lambda: self._cancel(asked, id_, _OPENAI)},
            }
        else:
            ways = {
                (): {"GET": lambda: self._list_messages(asked), "POST": lambda: self._create_messages(asked)},
                ("id",): {
                    "GET": lambda: self._show_batch(asked, id_, _ANTHROPIC),
                    "DELETE": lambda: self._delete_messages(asked, id_),
                },
                ("id", "cancel"): {"POST": lambda: self._cancel(asked, id_, _ANTHROPIC)},
                ("id", "results"): {"GET": lambda: self._results(asked, id_)},
            }
        found = ways.get(("id", *rest) if id_ else tuple(rest))
        if found is None:
            raise NotFound(f"no such path: {shown(path)}")
        if method not in found:
            raise MethodNotAllowed(f"this path takes {', '.join(found)}")
        return found[method]()

    # -- files

    async def _upload(self, asked: Asked) -> bytes:
        upload = asked.exchange.request.upload
        if not isinstance(upload, FileUpload):
            raise InvalidRequest("expected a form: content-type multipart/form-data with purpose and file")
        return wire.encode(file_view(await upload.complete()))

    async def _list_files(self, asked: Asked) -> bytes:
        page = wire.read_page(asked.query, after="after", most=10_000, usual=1000, takes=("order", "purpose"))
        purposes = _PURPOSES if page.purpose is None else (page.purpose,) if page.purpose in _PURPOSES else ()
        found = await self._store.page(asked.tenant_id, purposes, page)
        return list_view([file_view(file) for file in found], page.limit)

    async def _file(self, asked: Asked, file_id: str) -> StoredFile:
        file = await self._store.find(asked.tenant_id, file_id)
        if file is None or file.purpose not in _PURPOSES:
            raise FileNotFound(f"there is no file '{shown(file_id)}', or it is no longer kept")
        return file

    async def _show_file(self, asked: Asked, file_id: str) -> bytes:
        return wire.encode(file_view(await self._file(asked, file_id)))

    async def _delete_file(self, asked: Asked, file_id: str) -> bytes:
        await self._file(asked, file_id)
        if not await self._store.delete(asked.tenant_id, file_id):
            raise FileNotFound(f"there is no file '{shown(file_id)}', or it is no longer kept")
        return wire.encode({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, asked: Asked, file_id: str) -> None:
        file = await self._file(asked, file_id)
        named = f'attachment; filename="{file.id}.jsonl"'.encode()
        await self._send(asked, file, render([(b"content-disposition", named)]))

    async def _send(self, asked: Asked, file: StoredFile, headers: bytes = b"") -> None:
        """A file as the answer, as fast as the client takes it."""
        lines = asked.headers.replace(b"application/json", b"application/jsonl") + headers
        stream = ClientStream(asked.exchange, lines, file.num_bytes)
        async for data in self._store.chunks(file):
            if not await stream.write(data):
                return
        stream.close()

    # -- batches

    async def _create(self, asked: Asked) -> bytes:
        wanted = wire.read_batch(asked.exchange.request.body)
        after = wanted.output_expires_after
        file = await self._store.find(asked.tenant_id, wanted.input_file_id)
        if file is None or file.purpose not in _PURPOSES:
            raise FileNotFound(f"there is no file '{shown(wanted.input_file_id)}'", param="input_file_id")
        if file.purpose != "batch":
            raise InvalidRequest("input_file_id: that is a file of results, not of requests", param="input_file_id")
        facts = BatchFacts(
            wanted.endpoint,
            wanted.completion_window,
            asked.caller.key_id,
            self._settings.keep_s if after is None else min(float(after.seconds), self._settings.keep_s),
            wanted.metadata,
        )
        return wire.encode(
            batch_view(await self._add(asked, f"batch_{uuid4().hex}", _OPENAI, facts, file.id, wanted.window_s))
        )

    async def _add(
        self,
        asked: Asked,
        batch_id: str,
        kind: str,
        facts: BatchFacts,
        file_id: str,
        window_s: float,
        num_rows: int = 0,
    ) -> StoredBatch:
        limits = self._settings.batch_limits
        batch = await self._store.blocking(
            self._book.add,
            asked.tenant_id,
            batch_id,
            kind,
            facts,
            input_file_id=file_id,
            window_s=window_s,
            limits=limits,
            num_rows=num_rows,
        )
        assert self.runner is not None
        self.runner.look_now()
        return batch

    async def _batch(self, asked: Asked, batch_id: str, kind: str) -> StoredBatch:
        return _known(await self._store.blocking(self._book.find, asked.tenant_id, batch_id, kind), batch_id)

    async def _show_batch(self, asked: Asked, batch_id: str, kind: str) -> bytes:
        return _shown(await self._batch(asked, batch_id, kind))

    async def _cancel(self, asked: Asked, batch_id: str, kind: str) -> bytes:
        found = await self._store.blocking(self._book.cancel, asked.tenant_id, batch_id, kind)
        batch = _known(found, batch_id)
        assert self.runner is not None
        self.runner.cancelled(batch.id)
        return _shown(batch)

    async def _list_batches(self, asked: Asked) -> bytes:
        page = wire.read_page(asked.query, after="after", most=100, usual=20, takes=())
        found = await self._page(asked, _OPENAI, page.after, page.limit + 1)
        return list_view([batch_view(batch) for batch in found], page.limit)

    async def _page(
        self, asked: Asked, kind: str, after: str | None, limit: int, *, is_descending: bool = True
    ) -> list[StoredBatch]:
        found = await self._store.blocking(
            self._book.page, asked.tenant_id, kind, after=after, limit=limit, is_descending=is_descending
        )
        if found is None:
            raise InvalidRequest(f"there is no batch '{shown(after or '')}' to go on from", param="after")
        return found

    # -- batches of messages

    async def _create_messages(self, asked: Asked) -> bytes:
        upload, batch_id = asked.exchange.request.upload, f"msgbatch_{uuid4().hex}"
        if not isinstance(upload, MessagesUpload):
            raise InvalidRequest("the body is empty; expected a JSON object")
        ttl_s = _MESSAGES_WINDOW_S + self._settings.keep_s
        received = await upload.complete(f"{batch_id}.jsonl", ttl_s)
        facts = BatchFacts(wire.MESSAGES, "24h", asked.caller.key_id, self._settings.keep_s)
        try:
            batch = await self._add(
                asked, batch_id, _ANTHROPIC, facts, received.file.id, _MESSAGES_WINDOW_S, received.num_rows
            )
        except PenstockError:
            await self._store.delete(asked.tenant_id, received.file.id)
            raise
        return _shown(batch)

    async def _list_messages(self, asked: Asked) -> bytes:
        query = asked.query
        backwards = any(name == "before_id" for name, _ in query)
        cursor = "before_id" if backwards else "after_id"
        page = wire.read_page(query, after=cursor, most=1000, usual=20, takes=())
        found = await self._page(asked, _ANTHROPIC, page.after, page.limit + 1, is_descending=not backwards)
        has_more, found = len(found) > page.limit, found[: page.limit]
        if backwards:
            found.reverse()
        data = [message_batch_view(batch) for batch in found]
        ids = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return wire.encode({"data": data, "has_more": has_more, "first_id": ids[0], "last_id": ids[1]})

    async def _delete_messages(self, asked: Asked, batch_id: str) -> bytes:
        if not await self._store.blocking(self._book.delete, asked.tenant_id, batch_id, _ANTHROPIC):
            raise BatchNotFound(f"there is no batch '{shown(batch_id)}', or it is no longer kept")
        return wire.encode({"id": batch_id, "type": "message_batch_deleted"})

    async def _results(self, asked: Asked, batch_id: str) -> None:
        batch = await self._batch(asked, batch_id, _ANTHROPIC)
        if batch.is_active:
            raise NotFound("the batch has not ended: it has no results yet")
        file_id = batch.facts.output_file_id
        file = await self._store.find(asked.tenant_id, file_id) if file_id else None
        if file is None:
            raise NotFound("the batch has no results, or they are no longer kept")
        await self._send(asked, file)


def _known(batch: StoredBatch | None, batch_id: str) -> StoredBatch:
    if batch is None:
        raise BatchNotFound(f"there is no batch '{shown(batch_id)}', or it is no longer kept")
    return batch


def _shown(batch: StoredBatch) -> bytes:
    return wire.encode(batch_view(batch) if batch.kind == _OPENAI else message_batch_view(batch))


def _refuse(exchange: Exchange, error: PenstockError, refuse: Refuse) -> None:
    if not exchange.is_open:
        return
    if exchange.is_started:
        exchange.abort()
    else:
        refuse(error)
