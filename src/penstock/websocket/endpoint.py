"""The application's front for WebSockets: which paths have them, who may open one, how many there are.

It takes every exchange, and hands on what asks for no WebSocket. A page of another origin is refused unless its origin
is allowed: a browser asks nobody before it opens a socket, and CORS does not hold it back.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping

from penstock.api.page_guard import PageGuard
from penstock.core.errors import (
    EngineUnavailable,
    Overloaded,
    PenstockError,
    Unauthenticated,
    UpgradeRequired,
)
from penstock.http.exchange import Exchange
from penstock.http.message import render_error
from penstock.observe.registry import Registry
from penstock.observe.websocket_catalog import CLOSED, MESSAGES, OPEN, REFUSED, WEBSOCKET_CATALOG
from penstock.websocket import handshake
from penstock.websocket.chat import ChatSession
from penstock.websocket.frames import CloseCode
from penstock.websocket.memory import Room
from penstock.websocket.responses import ResponsesSession
from penstock.websocket.session import App, Lines, Session
from penstock.websocket.settings import WebSocketSettings
from penstock.websocket.socket import WebSocket

log = logging.getLogger("penstock.websocket")

_KINDS: Mapping[bytes, type[Session]] = {b"/v1/chat/completions": ChatSession, b"/v1/responses": ResponsesSession}
PATHS = frozenset(_KINDS)
_CREDENTIALS = (b"authorization", b"x-api-key")
_RETRY_S = 5.0
_UNNAMED = 4  # of all sockets, the part that may be open without a key
_VERSION = b"sec-websocket-version: 13\r\n"


# The tenant of whoever sends these headers from this address; empty where nobody needs a key. Raises Unauthenticated
# where one is needed.
Admit = Callable[[Lines, str], str]


class WebSockets:
    """The server's `app`, in front of another one. It is the lobby of its sessions."""

    def __init__(
        self,
        app: App,
        admit: Admit,
        pages: PageGuard,
        settings: WebSocketSettings | None = None,
        registry: Registry | None = None,
    ) -> None:
        """`pages`: which pages of other origins may use it. `registry`: one that has the catalog of WebSockets."""
        self.app = app
        self.room = Room()
        self.settings = settings or WebSocketSettings()
        self.registry = registry or Registry(WEBSOCKET_CATALOG)
        self._admit = admit
        self._pages = pages
        self._sessions: set[Session] = set()
        self._num_of: Counter[str] = Counter()  # by tenant
        self._open = self.registry.count(OPEN)
        self._received, self._sent = (self.registry.count(MESSAGES, way) for way in ("received", "sent"))

    def __call__(self, exchange: Exchange) -> None:
        request = exchange.request
        if not exchange.can_upgrade:
            self.app(exchange)
            return
        try:
            self._accept(exchange)
        except PenstockError as error:
            self.registry.count(REFUSED, error.code).value += 1
            status, headers, body = render_error(error, request.target)
            extra = _VERSION if isinstance(error, UpgradeRequired) else b""
            exchange.respond(status, headers + extra, body)

    def over(self, app: App) -> App:
        """The same in front of an application that has more paths than its requests go to."""

        def serve(exchange: Exchange) -> None:
            (self if exchange.can_upgrade else app)(exchange)

        return serve

    # -- the sessions' side

    def owner_of(self, headers: Lines, peer: str) -> str:
        return self._admit(headers, peer)

    def enter(self, session: Session, owner: str) -> None:
        if owner and self._num_of[owner] >= self.settings.max_sockets_per_tenant:
            most = self.settings.max_sockets_per_tenant
            raise Overloaded(f"{most} sockets of this tenant are open", reason="sockets", retry_after_s=_RETRY_S)
        self._num_of[owner] += 1

    def leave(self, session: Session, code: int) -> None:
        self._sessions.discard(session)
        if session.owner is not None:
            self._num_of[session.owner] -= 1
            if not self._num_of[session.owner]:
                del self._num_of[session.owner]
        self._open.value = len(self._sessions)
        self.registry.count(CLOSED, _code_label(code)).value += 1
        log.info(
            "path=%s tenant=%s requests=%d received=%d sent=%d code=%d seconds=%.1f",
            session.path.decode(errors="replace"),
            session.owner or "-",
            session.num_requests,
            session.num_received,
            session.num_sent,
            code,
            session.socket.now - session.began_at,
        )

    def counted(self, session: Session, is_sent: bool) -> None:
        (self._sent if is_sent else self._received).value += 1

    # -- inside

    def _accept(self, exchange: Exchange) -> None:
        request, settings = exchange.request, self.settings
        handshake.check(request.headers)
        self._pages.check_origin(request.headers)
        offer = handshake.read_offer(request.headers)
        if offer.key is not None and not any(name in request.headers for name in _CREDENTIALS):
            request.headers[b"authorization"] = b"Bearer " + offer.key.encode("latin-1")
        if len(self._sessions) >= settings.max_sockets:
            raise EngineUnavailable(
                "this process has as many sockets as it takes", reason="sockets", retry_after_s=_RETRY_S
            )
        owner = self._owner(request.headers, exchange.peer)
        if owner is None and sum(one.owner is None for one in self._sessions) >= -(-settings.max_sockets // _UNNAMED):
            raise EngineUnavailable("too many sockets have no key yet", reason="sockets", retry_after_s=_RETRY_S)
        socket = WebSocket(settings, owner)
        session = _KINDS[request.path](self, request, socket, owner)
        if owner is not None:
            self.enter(session, owner)
        socket.listener = session
        self._sessions.add(session)
        self._open.value = len(self._sessions)
        lines = handshake.answer(request.headers, offer.protocol) + b"x-request-id: %b\r\n" % uuid.uuid4().hex.encode()
        exchange.upgrade(lines, socket)

    def _owner(self, headers: Lines, peer: str) -> str | None:
        """None: a key is needed and none is here. It may come in the first message."""
        try:
            return self._admit(headers, peer)
        except Unauthenticated:
            if any(name in headers for name in _CREDENTIALS):
                raise
            return None


def _code_label(code: int) -> str:
    """Codes are a client's to choose: those that are not known are one."""
    return str(code) if code in frozenset(CloseCode) else "other"
