"""An ASGI application behind this server, with the same limits on clients: how a replica is served.

The application gets a request when all of it is here. Its answer waits while its client takes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from penstock.api.asgi import Message, Receive, Scope, Send
from penstock.core.errors import PenstockError
from penstock.http.exchange import Exchange
from penstock.http.message import render

logger = logging.getLogger("penstock")

Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_GONE = "the client went away"
_GOODBYE_S = 5.0  # for an application to end what nobody waits for any more


class AsgiApp:
    """The server's `app`: a task of the ASGI application for each request."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(_Cycle(exchange).run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """The application is started before the block; after it, it is stopped, once no request is left."""
        told: asyncio.Queue[str] = asyncio.Queue()
        answers: asyncio.Queue[Message] = asyncio.Queue()

        async def receive() -> Message:
            return {"type": f"lifespan.{await told.get()}"}

        async def change(phase: str) -> None:
            told.put_nowait(phase)
            answer = await answers.get()
            if answer["type"] != f"lifespan.{phase}.complete":
                raise RuntimeError(f"{phase} failed: {answer.get('message', '')}")

        task = asyncio.ensure_future(self._app({"type": "lifespan"}, receive, answers.put))
        try:
            await change("startup")
            try:
                yield
            finally:
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=_GOODBYE_S)
                await change("shutdown")
        finally:
            for one in (task, *self._tasks):
                one.cancel()
            await asyncio.gather(task, *self._tasks, return_exceptions=True)


class _Cycle:
    """One request at the application, and the watcher of its exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._peer = exchange.peer  # now: the client may be gone when the application gets to it
        self._is_received = False
        self._head: tuple[int, bytes, int] | None = None  # status, header lines and length, until the body is there
        self._over = asyncio.Event()  # answered, or nobody is there to answer
        self._may_write = asyncio.Event()
        self._may_write.set()
        exchange.watcher = self

    async def run(self, app: Application) -> None:
        exchange = self._exchange
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception:
            logger.exception("the application failed on %s %s", exchange.request.method, exchange.request.path)
        finally:
            self._over.set()
            if exchange.is_open:  # a client must not take what it has for the whole
                exchange.abort() if exchange.is_started else exchange.refuse(PenstockError("internal error"))

    # -- the exchange's side

    def client_gone(self) -> None:
        self._over.set()
        self._may_write.set()

    def pause(self) -> None:
        self._may_write.clear()

    def resume(self) -> None:
        self._may_write.set()

    # -- the application's side

    def _scope(self) -> Scope:
        request = self._exchange.request
        return {
            "type": "http",
            "method": request.method.decode("latin-1"),
            "path": unquote_to_bytes(request.path).decode("utf-8", "replace"),
            "query_string": request.query,
            "headers": list(request.headers.items()),
            "client": (self._peer, 0),
        }

    async def _receive(self) -> Message:
        if not self._is_received:
            self._is_received = True
            return {"type": "http.request", "body": self._exchange.request.body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        exchange = self._exchange
        if not exchange.is_open:
            raise OSError(_GONE)
        if message["type"] == "http.response.start":
            self._start(message["status"], message["headers"])
            return
        data, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._head is not None:
            (status, lines, length), self._head = self._head, None
            exchange.start(status, lines, length=length, data=data, is_last=is_last)
        else:
            exchange.write(data, is_last)
        if is_last:
            self._over.set()
        elif not self._may_write.is_set():
            await self._may_write.wait()
            if not exchange.is_open:
                raise OSError(_GONE)

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        kept = []
        length: int | None = None
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self._exchange.close_after()
            else:
                kept.append((name, value))
        lines = _date(int(time.time())) + render(kept)
        if length is None:  # a stream's first event may take long
            self._exchange.start(status, lines)
        else:
            self._head = (status, lines, length)


@lru_cache(maxsize=1)
def _date(now_s: int) -> bytes:
    return b"date: %b\r\n" % formatdate(now_s, usegmt=True).encode()
