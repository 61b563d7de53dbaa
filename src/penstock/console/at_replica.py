"""The console in front of a single replica: the same page and paths as at a gateway (`at_gateway`), for this machine.

A replica has no keys, so what the page shows is only for those who are on the machine, by the rules of the admin API;
with a secret, for those who know it, as `penstock top --key SECRET` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock import __version__
from penstock.api.asgi import Receive, Request, Route, Router, Scope, Send
from penstock.api.replica_report import ReplicaReport
from penstock.api.sink import Sink, SseStream, json_response, respond
from penstock.console.feed import PERIOD_S, Feed
from penstock.console.pages import load_pages, owns
from penstock.console.replica_source import ReplicaSource, facts_of
from penstock.core.errors import NotFound, PermissionDenied
from penstock.core.slo import Slo
from penstock.gateway.admin.guard import Guard
from penstock.http.message import Request as PlainRequest
from penstock.server.gateway_headers import GatewayTrust
from penstock.server.recorder import Finished
from penstock.tenancy.admins import AdminRing
from penstock.tenancy.keys import KeyRing

_WAITING = 4  # events for one who reads slowly; more are missed
_NO_STORE = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_CLOSED = (
    "this server listens beyond this machine and knows no keys, so its console is closed; "
    "`penstock gateway` in front of it has both"
)
_SECRET = "this replica has a gateway_secret, so it is for its gateways; the console is at theirs"


class Replica(Protocol):
    """The application of a replica, whatever its models take."""

    trust: GatewayTrust

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def report(self) -> ReplicaReport: ...


class Recorder(Protocol):
    listeners: list[Callable[[Finished], None]]  # told of each request at its end


class ConsoleAtReplica:
    """The ASGI application: the console's paths here, all others at the replica."""

    def __init__(self, replica: Replica, feed: Feed, *, is_loopback: bool) -> None:
        self._replica = replica
        self._feed = feed
        self._is_loopback = is_loopback
        self._guard = Guard(AdminRing(), KeyRing(), is_loopback=True)
        self._pages = load_pages()
        pages = [Route("GET", path, self._page) for path in self._pages]
        self._router = Router(
            [
                *pages,
                Route("GET", "/console/v1/session", self._session),
                Route("GET", "/console/v1/feed", self._stream),
                Route("GET", "/console/v1/requests/{id}", self._request),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and owns(scope["path"])
        await (self._router if is_ours else self._replica)(scope, receive, send)

    async def _page(self, request: Request, sink: Sink) -> None:
        accepts, known = (request.headers.get(name, "").encode() for name in ("accept-encoding", "if-none-match"))
        status, headers, body = self._pages[request.path].answer(accepts, known)
        length = [] if status == 304 else [(b"content-length", b"%d" % len(body))]
        await respond(sink, status, body, [*headers, *length])

    async def _session(self, request: Request, sink: Sink) -> None:
        session = {
            "kind": "replica",
            "version": __version__,
            "needs_key": False,
            "needs_tenant_key": False,
            "closed": _SECRET if self._replica.trust.has_secret else "" if self._is_loopback else _CLOSED,
        }
        await json_response(sink, 200, msgspec.json.encode(session), _NO_STORE)

    async def _stream(self, request: Request, sink: Sink) -> None:
        self._check(request)
        await request.body(0)
        await request.while_connected(self._push(sink))

    async def _push(self, sink: Sink) -> None:
        events: asyncio.Queue[bytes] = asyncio.Queue()
        viewer = _queued(events)
        async with SseStream(sink) as stream:
            self._feed.watch(viewer, lambda: events.put_nowait(b""))
            try:
                while event := await events.get():
                    await stream.write(event)
            finally:
                self._feed.leave(viewer)

    async def _request(self, request: Request, sink: Sink) -> None:
        self._check(request)
        found = self._feed.request(request.path_param)
        if found is None:
            raise NotFound("this request is not among the last that ended here")
        await json_response(sink, 200, msgspec.json.encode(found), _NO_STORE)

    def _check(self, request: Request) -> None:
        if self._replica.trust.has_secret:
            self._replica.trust.check(request)
            return
        if not self._is_loopback:
            raise PermissionDenied(_CLOSED)
        headers = dict(request.raw_headers)
        self._guard.check(PlainRequest(request.method.encode(), request.path.encode(), headers, b""))


def with_console(
    replica: Replica, recorder: Recorder, model: str, slo: Slo, *, is_loopback: bool, period_s: float = PERIOD_S
) -> tuple[ConsoleAtReplica, Feed]:
    """The replica with a console in front of it, which has begun to follow it: for the event loop."""
    feed = Feed(ReplicaSource(model, slo, replica.report), period_s=period_s)
    recorder.listeners.append(lambda finished: feed.ended(facts_of(finished)))
    feed.start()
    return ConsoleAtReplica(replica, feed, is_loopback=is_loopback), feed


def _queued(events: asyncio.Queue[bytes]) -> Callable[[bytes], None]:
    def put(event: bytes) -> None:
        if events.qsize() < _WAITING:
            events.put_nowait(event)

    return put
