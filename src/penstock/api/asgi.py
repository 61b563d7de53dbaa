"""A small ASGI toolkit for the replica's server and its console: requests, routes and the sink that answers go to.

Plain ASGI, no framework. A handler is `async def handler(request, sink)`; it raises a PenstockError to refuse, and the
router turns that into the error's JSON. Nothing here knows what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from penstock.api import sse
from penstock.api.errors import OPENAI, Convention, convention_at, error_headers
from penstock.api.sink import Headers, Sink, json_response, respond
from penstock.core.errors import BodyTooLarge, InvalidRequest, MethodNotAllowed, NotFound, PenstockError, RequestAborted

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Hook = Callable[[], Awaitable[None]]
T = TypeVar("T")

logger = logging.getLogger("penstock")

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Request:
    """A client's request. Its body is read once."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client: str | None = scope["client"][0] if scope.get("client") else None
        self.path_param = ""  # what stood in place of the route's {param}
        self.convention = OPENAI  # the route's
        self.is_disconnected = False
        self.raw_headers: Headers = scope["headers"]
        self._receive = receive

    @cached_property
    def headers(self) -> dict[str, str]:
        """Header values by lower-case name; of a repeated header the last."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self.raw_headers}

    @cached_property
    def id(self) -> str:
        """The client's own x-request-id if it is fit for logs and headers, else a fresh one."""
        wanted = self.headers.get("x-request-id", "")
        return wanted if _SANE_REQUEST_ID.fullmatch(wanted) else uuid.uuid4().hex

    @property
    def trace_context(self) -> dict[bytes, bytes]:
        """The headers that say which trace it is part of."""
        return {name: value for name, value in self.raw_headers if name in (b"traceparent", b"tracestate")}

    def error_event(self, error: PenstockError) -> bytes:
        """An error in mid-stream, as this request's client reads it."""
        return sse.error_event(error, self.id, self.convention)

    def check_is_json(self) -> None:
        """A guard of routes that change the server: no web page can have this type sent to one that does not agree."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise InvalidRequest("this takes content-type: application/json", param="content-type")

    async def body(self, limit_bytes: int) -> bytes:
        """The whole body. Raises BodyTooLarge as soon as that is certain, RequestAborted if the client goes away."""
        try:
            declared_bytes = int(self.headers.get("content-length", "0"))
        except ValueError:
            raise InvalidRequest("content-length is not a number") from None
        self._check_size(declared_bytes, limit_bytes)
        body = bytearray()
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_disconnected = True
                raise RequestAborted("the client went away before its request was complete")
            body += message.get("body", b"")
            self._check_size(len(body), limit_bytes)
            more = message.get("more_body", False)
        return bytes(body)

    async def watch_disconnect(self) -> None:
        """Returns when the client has gone away (or its response is complete). Only after the body was read."""
        while not self.is_disconnected:
            message = await self._receive()
            self.is_disconnected = message["type"] == "http.disconnect"

    async def while_connected(self, work: Awaitable[T]) -> T:
        """The result of `work`; if the client goes away first, `work` is cancelled and RequestAborted raised."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.watch_disconnect())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise RequestAborted("the client went away")
            return task.result()
        finally:
            # On every way out, cancellation from above included, neither outlives this call.
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    @staticmethod
    def _check_size(size_bytes: int, limit_bytes: int) -> None:
        if size_bytes > limit_bytes:
            raise BodyTooLarge(f"the body is larger than the limit of {limit_bytes} bytes")


async def error_response(sink: Sink, error: PenstockError, request: Request, headers: Headers = ()) -> None:
    convention = request.convention
    body = convention.body(error, request.id)
    await json_response(sink, convention.status(error), body, [*error_headers(error), *headers])


Handler = Callable[[Request, Sink], Awaitable[None]]


class Route(NamedTuple):
    method: str
    path: str  # may end in one {param}, which takes the whole rest of the path, slashes included
    handler: Handler
    convention: Convention = OPENAI  # one for all methods of a path


class Router:
    """The ASGI application: finds the handler, names the request, and answers for every error.

    `guard` sees every request before anything is done about it, and raises to refuse."""

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        guard: Callable[[Request], None] = lambda request: None,
        startup: Hook | None = None,
        shutdown: Hook | None = None,
    ) -> None:
        self._guard = guard
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixed: dict[str, dict[str, Route]] = {}
        for route in routes:
            prefix, param, _ = route.path.partition("{")
            table = self._prefixed if param else self._exact
            table.setdefault(prefix, {})[route.method] = route
        self._hooks = {"startup": startup, "shutdown": shutdown}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(Request(scope, receive), send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await send({"type": "websocket.close"})

    async def _http(self, request: Request, send: Send) -> None:
        sink = AsgiSink(send, request)
        try:
            await self._dispatch(request, sink)
        except PenstockError as error:
            if sink.is_started and not request.is_disconnected:
                logger.warning("request %s failed in mid-response: %s", request.id, error.message)
            await sink.refuse(error)
        except Exception:
            logger.exception("request %s: %s %r failed", request.id, request.method, request.path)
            await sink.refuse(_internal_error(request.id))

    async def _dispatch(self, request: Request, sink: Sink) -> None:
        routes = self._find(request)
        request.convention = (
            next(iter(routes.values())).convention if routes else convention_at(request.path.encode(errors="replace"))
        )
        self._guard(request)
        if not routes:
            raise NotFound(f"there is nothing at {request.path}")
        methods = sorted({*routes, "OPTIONS"} | ({"HEAD"} if "GET" in routes else set()))
        allow = [(b"allow", ", ".join(methods).encode())]
        method = "GET" if request.method == "HEAD" else request.method
        if method in routes:
            await routes[method].handler(request, sink)
        elif method == "OPTIONS":
            await respond(sink, 204, b"", allow)
        else:
            error = MethodNotAllowed(f"{request.method} is not allowed on {request.path}")
            await error_response(sink, error, request, allow)

    def _find(self, request: Request) -> dict[str, Route]:
        if routes := self._exact.get(request.path):
            return routes
        for prefix, routes in self._prefixed.items():
            if request.path.startswith(prefix) and request.path != prefix:
                request.path_param = request.path.removeprefix(prefix)
                return routes
        return {}

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for phase in ("startup", "shutdown"):
            await receive()
            try:
                if hook := self._hooks[phase]:
                    await hook()
            except Exception as error:
                logger.exception("%s failed", phase)
                await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{phase}.complete"})


class AsgiSink:
    """A sink over an ASGI server's send, with the request's id on every response and no body for HEAD.

    A client has gone when the server noticed, or `watch_disconnect` did.
    """

    def __init__(self, send: Send, request: Request) -> None:
        self._send = send
        self._request = request
        self.is_started = False

    async def start(self, status: int, headers: Headers = ()) -> None:
        request_id = self._request.id.encode()
        tags = [(name, request_id) for name in self._request.convention.id_headers]
        await self._deliver({"type": "http.response.start", "status": status, "headers": [*headers, *tags]})

    async def write(self, data: bytes, is_last: bool = False) -> None:
        shown = b"" if self._request.method == "HEAD" else data
        await self._deliver({"type": "http.response.body", "body": shown, "more_body": not is_last})

    async def _deliver(self, message: Message) -> None:
        if self._request.is_disconnected:
            raise RequestAborted("the client went away")
        self.is_started = True
        try:
            await self._send(message)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "handler is closed" not in str(error):  # uvloop's closed transport
                raise
            self._request.is_disconnected = True
            raise RequestAborted("the client went away") from None

    async def refuse(self, error: PenstockError) -> None:
        """Answers with the error, if there is still somebody to answer and nothing was said so far."""
        if self.is_started or self._request.is_disconnected:
            return
        # Part of a body that is too large is still on its way; the connection is of no more use.
        closing = [(b"connection", b"close")] if isinstance(error, BodyTooLarge) else []
        with contextlib.suppress(RequestAborted):
            await error_response(self, error, self._request, closing)


def _internal_error(request_id: str | None = None) -> PenstockError:
    """All a client learns of a bug. The log has the rest, under the same id."""
    return PenstockError("internal error" + (f"; request id {request_id}" if request_id else ""))
