"""The gateway's listening side: accepts clients, keeps their deadlines, and ends in an orderly way.

It hands every complete request to one synchronous callable, `app(exchange)`. The server does not know what that does. A
`BodyGate` is asked before a body is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection
from typing import Protocol

from penstock.core.errors import PenstockError
from penstock.http import clock as clocks
from penstock.http.bodies import BodyBudget
from penstock.http.clock import LOOP_CLOCK, Timer, TimerClock
from penstock.http.connection import Connection
from penstock.http.cors import Cors
from penstock.http.exchange import Exchange
from penstock.http.limits import TICK_S, ClientLimits
from penstock.http.message import Request
from penstock.http.tls import ServerTls, TlsListener
from penstock.http.uploads import Upload, Uploads

logger = logging.getLogger("penstock.gateway")

App = Callable[[Exchange], None]


class BodyGate(Protocol):
    """Asked about a body that comes in more than one read, by a request that has none yet, before more is read."""

    def body_owner(self, head: Request) -> str | None:
        """The owner of the room that a body takes; None: the app needs no body, and gets the request without it.
        Raises where it is not wanted."""

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        """Answers a request whose body was not read, because `body_owner` raised or there was no room for it."""


class OpenGate:
    def body_owner(self, head: Request) -> str | None:
        return ""

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        exchange.refuse(error)


_BACKLOG = 4096
_UNSENT_BYTES = 256 << 10  # that the kernel takes for a client that does not read; left alone it takes megabytes


class Server:
    def __init__(
        self,
        app: App,
        limits: ClientLimits | None = None,
        clock: TimerClock = LOOP_CLOCK,
        *,
        gate: BodyGate | None = None,
        uploads: Uploads | None = None,
        cors: Cors | None = None,
        upgrades: Collection[bytes] = (),
    ) -> None:
        """`upgrades`: paths where a client may ask for a WebSocket. The app says what it gets."""
        self.limits = limits or ClientLimits()
        self.bodies = BodyBudget(self.limits.max_arriving_bytes)
        self.upgrades = frozenset(upgrades)
        self.now = 0.0  # the clock's time at the last sweep
        self.is_draining = False
        self.idle_grace_s = 0.0  # while draining: how long an idle connection is kept for a request that is on its way
        self._app = app
        self._gate = gate or OpenGate()
        self._uploads = uploads
        self.upload_paths = uploads.paths if uploads is not None else frozenset()
        self._cors = cors
        self._clock = clock
        self._connections: set[Connection] = set()
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}  # of connections that are none yet
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._sweep_timer: Timer | None = None
        self._all_closed: asyncio.Future[None] | None = None

    @property
    def num_connections(self) -> int:
        return len(self._connections) + len(self._handshakes)

    async def listen(self, sock: socket.socket, *, tls: ServerTls | None = None) -> None:
        """Starts to accept on a bound socket (`bound_socket`). More than one may be listened on."""
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # of the sockets that it accepts, too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if tls is None:
            loop = asyncio.get_running_loop()
            self._listeners.append(await loop.create_server(lambda: Connection(self), sock=sock, backlog=_BACKLOG))
        else:
            self._listeners.append(TlsListener(sock, lambda client: self._shake_hands(client, tls), self._clock))
        if self._sweep_timer is None:
            self._sweep()

    async def stop(self, grace_s: float = 30.0, *, idle_grace_s: float = 0.0) -> int:
        """Accepts no more, lets what runs finish, and after `grace_s` drops the rest; returns how many were dropped.

        `idle_grace_s` is for a process that another one replaces, where no client may see a reset: a connection that
        owes nothing stays so long for a request that is on its way, whose answer is its last. Stopping again without
        it ends the wait."""
        for listener in self._listeners:
            listener.close()
        self.is_draining, self.idle_grace_s = True, idle_grace_s
        if idle_grace_s:
            await asyncio.sleep(0)  # uvloop opens a connection one turn after it has accepted it
        else:
            handshakes = list(self._handshakes.values())
            for handshake in handshakes:
                handshake.cancel()
            await asyncio.gather(*handshakes)
        for connection in list(self._connections):
            connection.drain()
        await self._wait_closed(grace_s)
        num_dropped = self.num_connections
        for connection in list(self._connections):
            connection.abort()
        for handshake in list(self._handshakes.values()):
            handshake.cancel()
        await self._wait_closed(TICK_S)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        return num_dropped

    # -- the connections' side

    def serve(self, exchange: Exchange) -> None:
        if self._cors is not None and self._cors.answer(exchange):
            return
        try:
            self._app(exchange)
        except PenstockError as error:
            self._give_up(exchange, error)
        except Exception:
            logger.exception("the gateway failed on %s %s", exchange.request.method, exchange.request.path)
            self._give_up(exchange, PenstockError("internal error"))

    def body_owner(self, head: Request) -> str | None:
        try:
            return self._gate.body_owner(head)
        except PenstockError:
            raise
        except Exception:
            logger.exception("the gateway failed on the head of %s %s", head.method, head.path)
            raise PenstockError("internal error") from None

    def upload(self, head: Request, resume: Callable[[], None]) -> Upload:
        assert self._uploads is not None
        try:
            return self._uploads.open(head, resume)
        except PenstockError:
            raise
        except Exception:
            logger.exception("the gateway failed on the head of %s %s", head.method, head.path)
            raise PenstockError("internal error") from None

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        if self._cors is not None:
            self._cors.answer(exchange)
        self._gate.turn_away(exchange, error)

    def opened(self, connection: Connection) -> bool:
        self._handshakes.pop(connection, None)
        if not self._has_place():
            return False
        self._connections.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._look_whether_all_closed()

    # -- inside

    def _has_place(self) -> bool:
        is_open = not self.is_draining or self.idle_grace_s > 0
        return is_open and self.num_connections < self.limits.max_connections

    def _look_whether_all_closed(self) -> None:
        if self._all_closed is not None and not self.num_connections and not self._all_closed.done():
            self._all_closed.set_result(None)

    def _shake_hands(self, client: socket.socket, tls: ServerTls) -> None:
        if not self._has_place():
            client.close()
            return
        connection = Connection(self)
        task = asyncio.get_running_loop().create_task(self._encrypt(connection, client, tls))
        self._handshakes[connection] = task

    async def _encrypt(self, connection: Connection, client: socket.socket, tls: ServerTls) -> None:
        try:
            async with clocks.timeout(self._clock, self.limits.handshake_timeout_s):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, client, ssl=tls.context)
        except (OSError, TimeoutError, asyncio.CancelledError):  # a scanner, a client without our CA, one that is slow
            connection.never_opened()
            client.close()
        finally:
            self._handshakes.pop(connection, None)
            self._look_whether_all_closed()

    @staticmethod
    def _give_up(exchange: Exchange, error: PenstockError) -> None:
        if exchange.is_started:
            exchange.abort()
        else:
            exchange.refuse(error)

    def _sweep(self) -> None:
        self.now = now = self._clock.now()
        for connection in list(self._connections):
            connection.sweep(now)
        self._sweep_timer = self._clock.call_later(TICK_S, self._sweep)

    async def _wait_closed(self, timeout_s: float) -> None:
        if not self.num_connections:
            return
        self._all_closed = asyncio.get_running_loop().create_future()
        with contextlib.suppress(TimeoutError):
            async with clocks.timeout(self._clock, timeout_s):
                await self._all_closed


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket to listen on; port 0 picks a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock
