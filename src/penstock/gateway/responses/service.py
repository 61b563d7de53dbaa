"""The service that keeps responses: it opens a request that asks for state, keeps its answer, and shows what is kept.

The store blocks, so it is asked in threads; all else is called in the event loop. A response in the background is made
by the process that took it, which renews a lease in the store for as long as it lives. Should that die, or be stopped,
another finds the lease expired, and makes the response from its beginning: it is told, and charged, once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol, TypeVar
from uuid import uuid4

import msgspec

from penstock.api.responses import ResponseHead, parse_responses
from penstock.api.responses.objects import Object, encode, response
from penstock.api.responses.request import MAX_ID, Kept
from penstock.api.responses.stored import (
    StateAsked,
    Turn,
    input_items,
    item_page,
    patched,
    read_response,
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
from penstock.gateway.proxy.request_view import RESPONSES
from penstock.gateway.records.whole_bill import WholeBill
from penstock.gateway.responses.event_log import EventLog, LoggedExchange, LogReader, LogRoom, Look, StoreReader
from penstock.gateway.responses.exchange import BackgroundExchange, ResponseExchange
from penstock.gateway.responses.settings import ResponseSettings
from penstock.http.clock import Timer, TimerClock
from penstock.http.exchange import Exchange
from penstock.http.message import Request
from penstock.observe.background import count_error
from penstock.tenancy.keys import Caller
from penstock.tenancy.responses import ClaimedResponse, ResponseBook, StoredResponse
from penstock.tenancy.usage import Recorder

PREFIX = b"/v1/responses/"
LEASE_S = 30.0
RENEW_EVERY_S = 10.0
_FIRST_LOOK_S = 2.0
_THREADS = 2
_MAX_PENDING = 512  # calls of the store
_FINISHED = ("completed", "incomplete")

T = TypeVar("T")
Opened = Callable[[Exchange | None, PenstockError | None], None]

log = logging.getLogger(__name__)


class _Resolved(NamedTuple):
    body: bytes  # of the request without state
    items: str  # the request's own input


class Resume(Protocol):
    """The way of a response into the gateway that no client waits for."""

    def __call__(self, exchange: BackgroundExchange, key_id: str) -> bool:
        """False: its tenant is gone, or not active."""


class _Queued(NamedTuple):
    body: bytes
    key: tuple[str, str]  # tenant and response
    response: bytes


class ResponseService:
    def __init__(
        self, book: ResponseBook, settings: ResponseSettings, clock: TimerClock, ledger: Recorder | None = None
    ) -> None:
        """`ledger`: of responses in the background; None: they are charged as others are, also twice."""
        self._book = book
        self._settings = settings
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="responses")
        self._num_pending = 0
        self._owner = uuid4().hex
        self._active: dict[tuple[str, str], BackgroundExchange] = {}
        self._logs: dict[tuple[str, str], EventLog] = {}  # until the store has them
        self._room = LogRoom(settings.max_event_bytes)
        self._unsaved: list[Callable[[], object]] = []  # ends of responses that the store has not taken yet
        self._timer: Timer | None = None
        self._ledger = ledger
        self._resume: Resume | None = None
        self._is_ready: Callable[[], bool] = bool
        self._looking: Timer | None = None

    def start(self, resume: Resume, is_ready: Callable[[], bool]) -> None:
        """From now on what others leave is taken over, while there is somebody to make it."""
        self._resume, self._is_ready = resume, is_ready
        if self.is_keeping:
            self._looking = self._clock.call_later(_FIRST_LOOK_S, self._take_over)

    @property
    def is_keeping(self) -> bool:
        return self._settings.keep_s > 0

    def close(self) -> None:
        """Responses that are being made in the background are left to others. Blocks."""
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        for exchange in list(self._active.values()):
            self._leave(exchange)
        self._active.clear()
        self._threads.submit(self._book.release, self._owner)
        self._threads.shutdown(wait=True)

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
            self._run(resolve, resolved)

    def _resolve(self, tenant_id: str, body: bytes, asked: StateAsked) -> _Resolved:
        items = input_items(asked.input)
        turns = self._turns(tenant_id, asked.previous_response_id)
        kept = Kept(
            previous_response_id=asked.previous_response_id,
            store=asked.is_stored,
            background=bool(asked.background),
        )
        try:
            return _Resolved(with_conversation(body, turns, items, kept), encode(items).decode())
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
            self._run(add, done)
        except Overloaded as error:
            done(None, error)

    # -- in the background

    def _open_background(self, client: Exchange, caller: Caller, asked: StateAsked, opened: Opened) -> None:
        tenant_id = caller.tenant.id
        if not asked.is_stored:
            raise InvalidRequest("background can only be used when `store` is true", param="store")
        own = sum(tenant_id == tenant for tenant, _ in self._active)
        if own >= self._settings.max_background - len(self._active):  # the next tenant finds room, too
            problem = f"{own} responses of this tenant are being made in the background already"
            raise Overloaded(problem, reason="background", retry_after_s=5.0)

        def queued(found: _Queued | None, error: PenstockError | None) -> None:
            if found is None:
                opened(None, error)
                return
            asked_for = client.request
            request = Request(asked_for.method, asked_for.target, asked_for.headers, found.body)
            log = None
            if asked.stream:
                log = self._logs[found.key] = EventLog(msgspec.json.decode(found.response), self._room)
                LogReader(client, b"", log, after=-1)
            else:
                client.respond(200, b"content-type: application/json\r\n", found.response)
            exchange = self._background(request, found.key, log)
            opened(exchange, None)

        self._run(partial(self._queue, caller, client.request.body, asked), queued)

    def _background(self, request: Request, key: tuple[str, str], log: EventLog | None = None) -> BackgroundExchange:
        bill = WholeBill(self._ledger, key[1]) if self._ledger is not None else None
        if log is not None:
            exchange: BackgroundExchange = LoggedExchange(request, key, self._background_ended, bill, log)
        else:
            exchange = BackgroundExchange(request, key, self._background_ended, bill)
        self._active[key] = exchange
        self._renew_later()
        return exchange

    def _leave(self, exchange: BackgroundExchange) -> None:
        """To another process, which makes it from its beginning."""
        if exchange.bill is not None:
            exchange.bill.void()
        exchange.cancel()
        if (log := self._logs.pop(exchange.key, None)) is not None:
            log.give_up()

    def _take_over(self) -> None:
        """Claims responses that other processes have left."""
        self._looking = self._clock.call_later(RENEW_EVERY_S, self._take_over)
        room = self._settings.max_background // 2 - len(self._active)
        if room > 0 and self._is_ready():
            self._run(partial(self._book.claim, self._owner, LEASE_S, room), self._claimed, is_needed=True)

    def _claimed(self, found: list[ClaimedResponse] | None, error: PenstockError | None) -> None:
        if found is None:
            log.warning("responses that others have left cannot be looked for: %s", error)
            return
        for one in found:
            log.warning("response %s is made here: the gateway that made it is gone", one.id)
            body = without_stream(one.request.encode())  # its events would be others than its readers have
            request = Request(b"POST", RESPONSES, {b"content-type": b"application/json"}, body)
            exchange = self._background(request, (one.tenant_id, one.id))
            if self._resume is None or not self._resume(exchange, one.key_id):
                self._active.pop(exchange.key, None)
                self._save(
                    partial(
                        self._fail,
                        exchange.key,
                        {"code": "server_error", "message": "its tenant is gone, or not active"},
                    )
                )

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
            owner=self._owner,
            lease_s=LEASE_S,
            is_streamed=bool(asked.stream),
            request=body.decode(),
            key_id=caller.key_id,
        )
        return _Queued(body, (tenant_id, head.response_id), patched(begun, status="queued"))

    def _background_ended(self, exchange: BackgroundExchange, status: int, body: bytes) -> None:
        self._active.pop(exchange.key, None)
        tenant_id, response_id = exchange.key
        ended = read_response(body) if status == 200 else None
        if isinstance(exchange, LoggedExchange):
            self._stream_ended(exchange, ended, status, body)
            return
        work: Callable[[], object]
        if ended is None:
            work = partial(self._fail, exchange.key, _error_in(status, body))
        else:
            data, said = encode(ended | {"id": response_id}).decode(), str(ended.get("status"))
            work = partial(self._book.end, tenant_id, response_id, status=said, response=data, owner=self._owner)

        self._save(work)

    def _stream_ended(self, exchange: LoggedExchange, ended: Object | None, status: int, body: bytes) -> None:
        """The end of a stream is told to its readers when the store has it, or has failed to take it once; not if
        somebody else has ended the response, or makes it now."""
        (tenant_id, response_id), log = exchange.key, exchange.log
        if ended is None:
            ended = log.begun | {"status": "failed", "error": _error_in(status, body)}
        last = ended | {"id": response_id}

        def end() -> bool:
            data, said = encode(last).decode(), str(last.get("status"))
            return self._book.end(
                tenant_id, response_id, status=said, response=data, owner=self._owner, events=log.packed(last)
            )

        def told(is_ours: bool | None) -> None:
            if is_ours is not None:
                self._logs.pop(exchange.key, None)
            if is_ours is False:
                log.give_up()
            else:
                log.finish(last)

        self._save(end, told)

    def _save(self, work: Callable[[], T], told: Callable[[T | None], None] = lambda _: None) -> None:
        """The end of a response, again and again until the store takes it. `told`: what the store says, each time;
        None: it does not answer."""

        def done(found: T | None, error: PenstockError | None) -> None:
            told(found if error is None else None)
            if error is not None:
                count_error("store of responses", error)
                log.warning("a response made in the background is not in the store yet: %s", error.message)
                self._unsaved.append(partial(self._save, work, told))
                self._renew_later()

        self._run(work, done, is_needed=True)

    def _fail(self, key: tuple[str, str], told: Object) -> None:
        found = self._book.find(*key)
        if found is not None and found.is_active:
            data = patched(found.response, status="failed", error=told).decode()
            self._book.end(*key, status="failed", response=data)

    def _renew(self) -> None:
        """Renews the lease, and gives up what others have cancelled or deleted."""
        self._timer = None
        unsaved, self._unsaved = self._unsaved, []
        for save in unsaved:
            save()
        if not self._active:
            return
        self._renew_later()
        before = list(self._active)

        def renewed(found: set[tuple[str, str]] | None, error: PenstockError | None) -> None:
            if found is None:
                log.warning("the lease of responses in the background was not renewed: %s", error)
                return
            for key in before:
                if key not in found and key in self._active:
                    self._run(partial(self._book.find, *key), partial(self._not_ours, key), is_needed=True)

        self._run(partial(self._book.renew, self._owner, LEASE_S), renewed, is_needed=True)

    def _not_ours(self, key: tuple[str, str], found: StoredResponse | None, error: PenstockError | None) -> None:
        """It was cancelled or deleted; or another process makes it, since this one stood still for too long."""
        if key not in self._active:
            return
        if error is None and (found is None or not found.is_active):
            self._cancel(key)
        else:
            self._leave(self._active.pop(key))

    def _renew_later(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(RENEW_EVERY_S, self._renew)

    def _cancel(self, key: tuple[str, str]) -> None:
        if (exchange := self._active.pop(key, None)) is not None:
            exchange.cancel()
        if (log := self._logs.pop(key, None)) is not None:
            log.finish(log.begun | {"status": "cancelled"})

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
                self._cancel((tenant_id, response_id))
            exchange.respond(200, headers, body)

        self._run(partial(actions[rest, request.method], tenant_id, response_id, request.query), done)

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
        if (log := self._logs.get(key)) is not None:
            LogReader(exchange, named, log, after)
            return

        def look(reader: StoreReader) -> None:
            def seen(found: Look | None, error: PenstockError | None) -> None:
                reader.wait() if isinstance(error, StoreUnavailable) else reader.seen(found)

            try:
                self._run(partial(self._look, *key), seen)
            except Overloaded:
                reader.wait()

        def begun(found: Look | None, error: PenstockError | None) -> None:
            if found is None:
                assert error is not None
                refuse(error)
            else:
                StoreReader(exchange, named, self._clock, look, after).seen(found)

        self._run(partial(self._look, *key), begun)

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
        self._fail((tenant_id, response_id), told)
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

    # -- inside

    def _run(
        self,
        function: Callable[[], T],
        then: Callable[[T | None, PenstockError | None], None],
        *,
        is_needed: bool = False,
    ) -> None:
        """In a thread; `then` is told the result, or the error, in the event loop. Raises Overloaded if too many wait,
        but for what is needed."""
        if self._num_pending >= _MAX_PENDING and not is_needed:
            raise Overloaded("too many requests wait for the store of responses", reason="store", retry_after_s=1.0)
        self._num_pending += 1

        def done(future: asyncio.Future[T]) -> None:
            self._num_pending -= 1
            if future.cancelled():
                then(None, StoreUnavailable("the gateway is stopping"))
            elif (error := future.exception()) is None:
                then(future.result(), None)
            elif isinstance(error, PenstockError):
                then(None, error)
            else:
                log.error("the store of responses failed", exc_info=error)
                then(None, StoreUnavailable("the store of responses does not work"))

        asyncio.get_running_loop().run_in_executor(self._threads, function).add_done_callback(done)


def _error_in(status: int, body: bytes) -> Object:
    """The error of an answer that is none, as a response has it."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = f"{error.get('code')}: {error.get('message')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"the model's server answered with status {status}"
    code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if 400 <= status < 500 else "server_error"
    return {"code": code, "message": message}
