"""Responses that a process makes in the background: its lease on them, their ends, and those that others have left.

A response has an owner, the process that makes it, which renews a lease in the store for as long as it lives. Should
that die, or be stopped, another finds the lease expired, and makes the response from its beginning: it is told, and
charged, once. Belongs to the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar
from uuid import uuid4

import msgspec

from penstock.api.responses.objects import Object, encode
from penstock.api.responses.stored import patched, read_response, without_stream
from penstock.core.errors import Overloaded, PenstockError
from penstock.gateway.proxy.request_view import RESPONSES
from penstock.gateway.records.whole_bill import WholeBill
from penstock.gateway.responses.event_log import EventLog, LoggedExchange
from penstock.gateway.responses.exchange import BackgroundExchange
from penstock.gateway.responses.store_calls import StoreCalls
from penstock.http.clock import Timer, TimerClock
from penstock.http.message import Request
from penstock.observe.background import count_error
from penstock.tenancy.responses import ClaimedResponse, ResponseBook, StoredResponse
from penstock.tenancy.usage import Recorder

LEASE_S = 30.0
RENEW_EVERY_S = 10.0
_FIRST_LOOK_S = 2.0

T = TypeVar("T")
Key = tuple[str, str]  # tenant and response

log = logging.getLogger(__name__)


class Resume(Protocol):
    """The way of a response into the gateway that no client waits for."""

    def __call__(self, exchange: BackgroundExchange, key_id: str) -> bool:
        """False: its tenant is gone, or not active."""


class BackgroundResponses:
    def __init__(
        self, book: ResponseBook, calls: StoreCalls, clock: TimerClock, ledger: Recorder | None, max_active: int
    ) -> None:
        """`ledger`: None: they are charged as other requests are, one that is made twice also twice."""
        self.owner = uuid4().hex
        self._book = book
        self._calls = calls
        self._clock = clock
        self._ledger = ledger
        self._max_active = max_active
        self._active: dict[Key, BackgroundExchange] = {}
        self._logs: dict[Key, EventLog] = {}  # until the store has them
        self._unsaved: list[Callable[[], object]] = []  # ends of responses that the store has not taken yet
        self._timer: Timer | None = None
        self._resume: Resume | None = None
        self._is_ready: Callable[[], bool] = bool
        self._looking: Timer | None = None

    def start(self, resume: Resume, is_ready: Callable[[], bool]) -> None:
        """From now on what others leave is taken over, while there is somebody to make it."""
        self._resume, self._is_ready = resume, is_ready
        self._looking = self._clock.call_later(_FIRST_LOOK_S, self._take_over)

    def stop(self) -> None:
        """Leaves to others what is being made."""
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        for exchange in list(self._active.values()):
            self._leave(exchange)
        self._active.clear()

    def check_room(self, tenant_id: str) -> None:
        """Raises Overloaded."""
        own = sum(tenant_id == tenant for tenant, _ in self._active)
        if own >= self._max_active - len(self._active):  # the next tenant finds room, too
            problem = f"{own} responses of this tenant are being made in the background already"
            raise Overloaded(problem, reason="background", retry_after_s=5.0)

    def log_of(self, key: Key) -> EventLog | None:
        """Events of a stream that is made here, or that the store does not have yet."""
        return self._logs.get(key)

    def begin(self, request: Request, key: Key, log: EventLog | None = None) -> BackgroundExchange:
        """The exchange of a response that this process makes; the gateway has it from its caller. `log`: of one that is
        streamed."""
        bill = WholeBill(self._ledger, key[1]) if self._ledger is not None else None
        if log is not None:
            self._logs[key] = log
            exchange: BackgroundExchange = LoggedExchange(request, key, self._ended, bill, log)
        else:
            exchange = BackgroundExchange(request, key, self._ended, bill)
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
        room = self._max_active // 2 - len(self._active)
        if room > 0 and self._is_ready():
            self._calls.run(partial(self._book.claim, self.owner, LEASE_S, room), self._claimed, is_needed=True)

    def _claimed(self, found: list[ClaimedResponse] | None, error: PenstockError | None) -> None:
        if found is None:
            log.warning("responses that others have left cannot be looked for: %s", error)
            return
        for one in found:
            log.warning("response %s is made here: the gateway that made it is gone", one.id)
            body = without_stream(one.request.encode())  # its events would be others than its readers have
            request = Request(b"POST", RESPONSES, {b"content-type": b"application/json"}, body)
            exchange = self.begin(request, (one.tenant_id, one.id))
            if self._resume is None or not self._resume(exchange, one.key_id):
                self._active.pop(exchange.key, None)
                why = {"code": "server_error", "message": "its tenant is gone, or not active"}
                self._save(partial(fail, self._book, exchange.key, why, self.owner))

    def _ended(self, exchange: BackgroundExchange, status: int, body: bytes) -> None:
        self._active.pop(exchange.key, None)
        tenant_id, response_id = exchange.key
        ended = read_response(body) if status == 200 else None
        if isinstance(exchange, LoggedExchange):
            self._stream_ended(exchange, ended, status, body)
            return
        work: Callable[[], object]
        if ended is None:
            work = partial(fail, self._book, exchange.key, _error_in(status, body), self.owner)
        else:
            data, said = encode(ended | {"id": response_id}).decode(), str(ended.get("status"))
            work = partial(self._book.end, tenant_id, response_id, status=said, response=data, owner=self.owner)

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
                tenant_id, response_id, status=said, response=data, owner=self.owner, events=log.packed(last)
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

        self._calls.run(work, done, is_needed=True)

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

        def renewed(found: set[Key] | None, error: PenstockError | None) -> None:
            if found is None:
                log.warning("the lease of responses in the background was not renewed: %s", error)
                return
            for key in before:
                if key not in found and key in self._active:
                    self._calls.run(partial(self._book.find, *key), partial(self._not_ours, key), is_needed=True)

        self._calls.run(partial(self._book.renew, self.owner, LEASE_S), renewed, is_needed=True)

    def _not_ours(self, key: Key, found: StoredResponse | None, error: PenstockError | None) -> None:
        """It was cancelled or deleted; or another process makes it, since this one stood still for too long."""
        if key not in self._active:
            return
        if error is None and (found is None or not found.is_active):
            self.cancel(key)
        else:
            self._leave(self._active.pop(key))

    def _renew_later(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_later(RENEW_EVERY_S, self._renew)

    def cancel(self, key: Key) -> None:
        """Somebody has cancelled or deleted it."""
        if (exchange := self._active.pop(key, None)) is not None:
            exchange.cancel()
        if (log := self._logs.pop(key, None)) is not None:
            log.finish(log.begun | {"status": "cancelled"})


def fail(book: ResponseBook, key: Key, why: Object, owner: str | None = None) -> None:
    """The end of a response that is active, and is still this owner's; None: whoever's it is. Blocks."""
    found = book.find(*key)
    if found is not None and found.is_active:
        data = patched(found.response, status="failed", error=why).decode()
        book.end(*key, status="failed", response=data, owner=owner)


def _error_in(status: int, body: bytes) -> Object:
    """The error of an answer that is none, as a response has it."""
    try:
        error = msgspec.json.decode(body)["error"]
        message = f"{error.get('code')}: {error.get('message')}"
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"the model's server answered with status {status}"
    code = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if 400 <= status < 500 else "server_error"
    return {"code": code, "message": message}
