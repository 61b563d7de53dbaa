"""The console as a gateway serves it: the page for everybody, what it shows for admins.

GET /                            the page
GET /console/v1/session          whether a key is needed, and which dialects there are; says nothing else
GET /console/v1/feed             server-sent events: `hello` with the last quarter of an hour, then a `tick` a second
GET /console/v1/requests/ID      one request that is over, with the choices made for it
"""

from __future__ import annotations

import msgspec

from penstock import __version__
from penstock.console.feed import Feed
from penstock.console.pages import load_pages
from penstock.core.errors import MethodNotAllowed, NotFound
from penstock.gateway.admin.guard import Guard
from penstock.gateway.membership.factory import DIALECT_NAMES
from penstock.http.exchange import Exchange
from penstock.http.message import JSON, render
from penstock.tenancy.keys import KeyRing

_NO_STORE = render([(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")])
_EVENTS = render([(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]) + _NO_STORE
_REQUESTS = b"/console/v1/requests/"


class ConsoleAtGateway:
    def __init__(self, feed: Feed, guard: Guard, keys: KeyRing) -> None:
        self._feed = feed
        self._guard = guard
        self._keys = keys
        self._pages = load_pages()

    @staticmethod
    def owns(target: bytes) -> bool:
        return target.startswith((b"/console/", b"/?")) or target == b"/"

    def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.method not in (b"GET", b"HEAD"):
            raise MethodNotAllowed("the console takes GET")
        path = request.path
        page = self._pages.get(path.decode(errors="replace"))
        if page is not None:
            headers = request.headers
            status, lines, body = page.answer(headers.get(b"accept-encoding", b""), headers.get(b"if-none-match", b""))
            exchange.respond(status, render(lines), body)
        elif path == b"/console/v1/session":
            session = {
                "kind": "gateway",
                "version": __version__,
                "needs_key": not self._guard.is_open,
                "needs_tenant_key": self._keys.has_had_tenants,
                "dialects": DIALECT_NAMES,
            }
            exchange.respond(200, JSON + _NO_STORE, msgspec.json.encode(session))
        elif path == b"/console/v1/feed":
            self._guard.check(request)
            _Viewing(exchange, self._feed).begin()
        elif path.startswith(_REQUESTS):
            self._guard.check(request)
            found = self._feed.request(path.removeprefix(_REQUESTS).decode(errors="replace"))
            if found is None:
                raise NotFound("this request is not among the last that ended here")
            exchange.respond(200, JSON + _NO_STORE, msgspec.json.encode(found))
        else:
            raise NotFound(f"no such path: {path.decode(errors='replace')}")


class _Viewing:
    """One who looks. Whoever reads too slowly misses seconds."""

    def __init__(self, exchange: Exchange, feed: Feed) -> None:
        self._exchange = exchange
        self._feed = feed
        self._is_paused = False

    def begin(self) -> None:
        self._exchange.watcher = self
        self._exchange.start(200, _EVENTS)
        self._feed.watch(self._send, self._end)

    def _send(self, event: bytes) -> None:
        if not self._is_paused:
            self._exchange.write(event)

    def _end(self) -> None:
        self._exchange.write(b"", is_last=True)

    # -- the client

    def client_gone(self) -> None:
        self._feed.leave(self._send)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
