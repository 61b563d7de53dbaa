"""The service that keeps responses: it opens a request that asks for state, keeps its answer, and shows what is kept.

The store blocks, so it is asked in threads; all else is called in the event loop. What is made in the background is
`background`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import msgspec

from penstock.api.responses import ResponseHead, parse_responses
from penstock.api.responses.objects import Object, encode, response
from penstock.api.responses.request import MAX_ID, Kept
from penstock.api.responses.stored import (
    MAX_BYTES,
    StateAsked,
    Turn,
    input_items,
    item_page,
    patched,
    streams_after,
    with_conversation,
    without_stream,
)
from penstock.core.config import shown
from penstock.core.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PenstockError,
    PreviousResponseNotFound,
    ResponseNotFound,
    StoreUnavailable,
    UnsupportedParameter,
)
from penstock.gateway.proxy.body_reader import LONG_BYTES
from penstock.gateway.responses.background import LEASE_S, BackgroundResponses, Resume, fail
from penstock.gateway.responses.event_log import EventLog, LogReader, LogRoom, Look, StoreReader
from penstock.gateway.responses.exchange import ResponseExchange
from penstock.gateway.responses.settings import ResponseSettings
from penstock.gateway.responses.store_calls import StoreCalls
from penstock.http.clock import TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.observe.background import count_error
from penstock.tenancy.keys import Caller
from penstock.tenancy.responses import ResponseBook, StoredResponse
from penstock.tenancy.usage import Recorder

PREFIX = b"/v1/responses/"
_FINISHED = ("completed", "incomplete")

Opened = Callable[[Exchange | None, PenstockError | None], None]

log = logging.getLogger(__name__)


class _Resolved(NamedTuple):
    body: bytes  # of the request without state
    items: str  # the request's own input


class _Queued(NamedTuple):
    body: bytes
    key: tuple[str, str]  # tenant and response
    response: bytes


class ResponseService:
    def __init__(
        self,
        book: ResponseBook,
        settings: ResponseSettings,
        clock: TimerClock,
        ledger: Recorder | None = None,
        *,
        max_body_bytes: int = MAX_BYTES,
    ) -> None:
        """`ledger`: of responses in the background; None: they are charged as others are, also twice.
        `max_body_bytes`: of a request with its conversation, as of any request."""
        self._max_body_bytes = max_body_bytes
        self._book = book
        self._settings = settings
        self._clock = clock
        self._calls = StoreCalls()
        self._background = BackgroundResponses(book, self._calls, clock, ledger, settings.max_background)
        self._room = LogRoom(settings.max_event_bytes)

    def start(self, resume: Resume, is_ready: Callable[[], bool]) -> None:
        """From now on what others leave is taken over, while there is somebody to make it."""
        if self.is_keeping:
            self._background.start(resume, is_ready)

    @property
    def is_keeping(self) -> bool:
        return self._settings.keep_s > 0

    def close(self) -> None:
        """Responses that are being made in the background are left to others. Blocks."""
        self._background.stop()
        self._calls.close(partial(self._book.release, self._background.owner))

    # -- requests

    def open(self, client: Exchange, caller: Caller, asked: StateAsked, opened: Opened) -> None:
        """`opened` is told the exchange to go on with, now or later, or what is wrong. Raises what is wrong at once."""
        tenant_id = caller.tenant.id
        if not self.is_keeping:
            if (name := asked.needs_store) is not None:
                raise UnsupportedParameter(f"{name}: this gateway keeps no responses (responses.keep_s)", param=name)
        elif asked.background:
            self._open_background(client, caller, asked, opened)
            return
        body = client.request.body
        if not self.is_keeping or not (asked.is_stored or asked.previous_response_id):
            opened(ResponseExchange(client, body, None), None)
            return
        resolve = partial(self._resolve, tenant_id, body, asked)

        def resolved(found: _Resolved | None, error: PenstockError | None) -> None:
            if found is None:
                opened(None, error)
                return
            keep = partial(self._keep, tenant_id, asked, found.items) if asked.is_stored else None
            opened(ResponseExchange(client, found.body, keep), None)

        if asked.previous_response_id is None and len(body) <= LONG_BYTES:
            resolved(resolve(), None)
        else:
            self._calls.run(resolve, resolved)

    def _resolve(self, tenant_id: str, body: bytes, asked: StateAsked) -> _Resolved:
        items = input_items(asked.input)
        turns = self._turns(tenant_id, asked.previous_response_id)
        kept = Kept(
            previous_response_id=asked.previous_response_id,
            store=asked.is_stored,
            background=bool(asked.background),
        )
        try:
            return _Resolved(with_conversation(body, turns, items, kept, self._max_body_bytes), encode(items).decode())
        except (RecursionError, UnicodeError):
            raise InvalidRequest("input: it is nested too deeply, or is not UTF-8", param="input") from None

    def _turns(self, tenant_id: str, response_id: str | None) -> list[Turn]:
        if response_id is None:
            return []
        found = self._book.conversation(tenant_id, response_id) if response_id.isprintable() else []
        if not found or found[-1].status not in _FINISHED:
            what = f"has not ended well: it is {found[-1].status}" if found else "is not kept here, or no longer"
            problem = f"previous_response_id: '{shown(response_id)}' {what}"
            raise PreviousResponseNotFound(problem, param="previous_response_id")
        if found[0].previous_id is not None:
            raise PreviousResponseNotFound(
                f"previous_response_id: an earlier response of its conversation, '{found[0].previous_id}', is no "
                "longer kept",
                param="previous_response_id",
            )
        return [Turn(one.input, one.response) for one in found]

    def _keep(self, tenant_id: str, asked: StateAsked, items: str, ended: Object, told: Callable[[bool], None]) -> None:
        def add() -> None:
            self._book.add(
                tenant_id,
                str(ended["id"]),
                previous_id=asked.previous_response_id,
                status=str(ended.get("status")),
                input=items,
                response=encode(ended).decode(),
                limits=self._settings.limits,
            )

        def done(_: None, error: PenstockError | None) -> None:
            if error is not None:
                count_error("store of responses", error)
                log.warning("a response is not kept: %s", error.message)
            told(error is None)

        try:
            self._calls.run(add, done)
        except Overloaded as error:
            done(None, error)

    # -- in the background

    def _open_background(self, client: Exchange, caller: Caller, asked: StateAsked, opened: Opened) -> None:
        tenant_id = caller.tenant.id
        if not asked.is_stored:
            raise InvalidRequest("background can only be used when `store` is true", param="store")
        self._background.check_room(tenant_id)

        def queued(found: _Queued | None, error: PenstockError | None) -> None:
            if found is None:
                opened(None, error)
                return
            asked_for = client.request
            request = Request(asked_for.method, asked_for.target, asked_for.headers, found.body)
            log = None
            if asked.stream:
                log = EventLog(msgspec.json.decode(found.response), self._room)
                LogReader(client, b"", log, after=-1)
            else:
                client.respond(200, b"content-type: application/json\r\n", found.response)
            opened(self._background.begin(request, found.key, log), None)

        self._calls.run(partial(self._queue, caller, client.request.body, asked), queued)

    def _queue(self, caller: Caller, body: bytes, asked: StateAsked) -> _Queued:
        tenant_id = caller.tenant.id
        parse_responses(body)  # what is wrong with it is told now, not to whoever fetches the answer
        found = self._resolve(tenant_id, body, asked)
        body = found.body if asked.stream else without_stream(found.body)
        head = ResponseHead(uuid4().hex, int(time.time()))
        begun = encode(response(head, parse_responses(body), "in_progress"))
        self._book.add(
            tenant_id,
            head.response_id,
            previous_id=asked.previous_response_id,
            status="in_progress",
            input=found.items,
            response=begun.decode(),
            limits=self._settings.limits,
            owner=self._background.owner,
            lease_s=LEASE_S,
            is_streamed=bool(asked.stream),
            request=body.decode(),
            key_id=caller.key_id,
        )
        return _Queued(body, (tenant_id, head.response_id), patched(begun, status="queued"))

    # -- what is kept

    def show(self, exchange: Exchange, headers: bytes, tenant_id: str, refuse: Callable[[PenstockError], None]) -> None:
        """Answers a request for a response that is kept. `refuse` is told what is wrong, later; raises it at once."""
        request = exchange.request
        response_id, _, rest = request.path.removeprefix(PREFIX).decode(errors="replace").partition("/")
        actions: dict[tuple[str, bytes], Callable[[str, str, bytes], bytes]] = {
            ("", b"GET"): self._retrieve,
            ("", b"DELETE"): self._delete,
            ("cancel", b"POST"): self._cancel_stored,
            ("input_items", b"GET"): self._list_items,
        }
        methods = [method for path, method in actions if path == rest]
        if not methods:
            raise NotFound(f"no such path: {shown(request.path.decode(errors='replace'))}")
        if request.method not in methods:
            raise MethodNotAllowed(f"this path takes {', '.join(method.decode() for method in methods)}")
        if len(response_id) > MAX_ID or not response_id.isprintable():  # databases differ in what they make of a NUL
            raise ResponseNotFound(f"Response with id '{shown(response_id)}' not found.")

        if not rest and request.method == b"GET" and (after := streams_after(request.query)) is not None:
            self._stream(exchange, headers, (tenant_id, response_id), after, refuse)
            return

        def done(body: bytes | None, error: PenstockError | None) -> None:
            if body is None:
                assert error is not None
                refuse(error)
                return
            if request.method != b"GET":
                self._background.cancel((tenant_id, response_id))
            exchange.respond(200, headers, body)

        self._calls.run(partial(actions[rest, request.method], tenant_id, response_id, request.query), done)

    def _stream(
        self,
        exchange: Exchange,
        headers: bytes,
        key: tuple[str, str],
        after: int,
        refuse: Callable[[PenstockError], None],
    ) -> None:
        """Answers with the events after this number: from the log, if the response is made here, else from the
        store."""
        named = b"".join(line for line in headers.splitlines(keepends=True) if not line.startswith(b"content-type"))
        if (log := self._background.log_of(key)) is not None:
            LogReader(exchange, named, log, after)
            return

        def look(reader: StoreReader) -> None:
            def seen(found: Look | None, error: PenstockError | None) -> None:
                reader.wait() if isinstance(error, StoreUnavailable) else reader.seen(found)

            try:
                self._calls.run(partial(self._look, *key), seen)
            except Overloaded:
                reader.wait()

        def begun(found: Look | None, error: PenstockError | None) -> None:
            if found is None:
                assert error is not None
                refuse(error)
            else:
                StoreReader(exchange, named, self._clock, look, after).seen(found)

        self._calls.run(partial(self._look, *key), begun)

    def _look(self, tenant_id: str, response_id: str) -> Look:
        found = self._found(tenant_id, response_id)
        if not found.is_streamed:
            raise UnsupportedParameter(
                "stream: only a response that is made with background and stream has events to come back to",
                param="stream",
            )
        events = None if found.is_active else self._book.events(tenant_id, response_id)
        return Look(msgspec.json.decode(found.response), found.is_active, events)

    def _found(self, tenant_id: str, response_id: str) -> StoredResponse:
        found = self._book.find(tenant_id, response_id)
        if found is None:
            raise ResponseNotFound(f"Response with id '{shown(response_id)}' not found.")
        if not self._book.is_orphan(found):
            return found
        told = {"code": "server_error", "message": "the gateway that made this response is gone"}
        fail(self._book, (tenant_id, response_id), told)
        return self._book.find(tenant_id, response_id) or found

    def _retrieve(self, tenant_id: str, response_id: str, query: bytes) -> bytes:
        return self._found(tenant_id, response_id).response.encode()

    def _delete(self, tenant_id: str, response_id: str, _: bytes) -> bytes:
        if not self._book.delete(tenant_id, response_id):
            raise ResponseNotFound(f"Response with id '{shown(response_id)}' not found.")
        return encode({"id": response_id, "object": "response", "deleted": True})

    def _cancel_stored(self, tenant_id: str, response_id: str, _: bytes) -> bytes:
        found = self._found(tenant_id, response_id)
        if not found.is_background:
            raise InvalidRequest("Cannot cancel a synchronous response.")
        if found.is_active:
            cancelled = patched(found.response, status="cancelled").decode()
            self._book.end(tenant_id, response_id, status="cancelled", response=cancelled)
        return self._found(tenant_id, response_id).response.encode()

    def _list_items(self, tenant_id: str, response_id: str, query: bytes) -> bytes:
        return item_page(self._found(tenant_id, response_id).input, query)
