"""The way to one replica or provider: a pool of kept connections, and one call per request.

A call is answered through a `Receiver`, synchronously from the event loop: a head, data, an end; or one failure. Only a
new connection costs a task. The pool does not choose replicas, count their failures or try another: it says exactly
what happened, and how far the request had got, so that others can.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Self
from urllib.parse import urlsplit

from penstock.core.errors import ConfigError
from penstock.http import clock as clocks
from penstock.http.call import Call, Failure, FailureKind, Receiver
from penstock.http.clock import LOOP_CLOCK, Timer, TimerClock
from penstock.http.limits import TICK_S, UpstreamLimits
from penstock.http.tls import client_context
from penstock.http.upstream_connection import UpstreamConnection


class Upstream:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        limits: UpstreamLimits | None = None,
        clock: TimerClock = LOOP_CLOCK,
    ) -> None:
        """`server_name`: what the certificate must be good for, if not `host`. `clock`: its own, and that of everybody
        who follows the other side by it."""
        self.host = host
        self.port = port
        self.limits = limits or UpstreamLimits()
        self.clock = clock
        self.tls = tls  # of connections to come
        self._server_name = server_name or host
        bare = f"[{host}]" if ":" in host else host
        self._authority = (bare if port == (443 if tls else 80) else f"{bare}:{port}").encode()
        self._idle: list[UpstreamConnection] = []  # the last one used is the first one used again
        self._connections: set[UpstreamConnection] = set()  # all that are open
        self._connecting: dict[asyncio.Task[None], Call] = {}
        self._sweep_timer: Timer | None = None

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        limits: UpstreamLimits | None = None,
        clock: TimerClock = LOOP_CLOCK,
    ) -> Self:
        """`http://host:port` or `https://host`; a path is the caller's affair."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the address of an HTTP server: http://HOST:PORT or https://HOST")
        if parts.scheme == "http":
            return cls(parts.hostname, parts.port or 80, limits=limits, clock=clock)
        tls = tls or client_context()
        port = parts.port or 443
        return cls(parts.hostname, port, tls=tls, server_name=server_name, limits=limits, clock=clock)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_open(self) -> int:
        """Connections, used and kept, and those on their way."""
        return len(self._connections) + len(self._connecting)

    def send(self, method: bytes, target: bytes, headers: bytes, body: bytes, receiver: Receiver) -> Call:
        """Sends a request. `headers` are rendered lines without host and length. Answers come after this returns."""
        head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%bcontent-length: %d\r\n\r\n" % (
            method,
            target,
            self._authority,
            headers,
            len(body),
        )
        call = Call(self, receiver, head, body, method == b"HEAD")
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closing:
                connection.begin(call)
                return call
        self.connect(call)
        return call

    def close(self) -> None:
        """Drops everything; calls in flight fail."""
        for task, call in list(self._connecting.items()):
            task.cancel()
            call.task = None
            call.fail(Failure(FailureKind.REFUSED, "the pool was closed"))
        for connection in list(self._connections):
            connection.abort()
        self._idle.clear()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

    # -- the calls' and the connections' side

    def connect(self, call: Call) -> None:
        """Gives the call a connection of its own, fresh: nobody can have closed it while it was unused."""
        call.task = task = asyncio.get_running_loop().create_task(self._connect(call))
        self._connecting[task] = call
        task.add_done_callback(self._connecting.pop)

    def opened(self, connection: UpstreamConnection) -> None:
        self._connections.add(connection)
        if self._sweep_timer is None:
            self._sweep()

    def closed(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        if connection.is_idle and connection in self._idle:
            self._idle.remove(connection)

    def release(self, connection: UpstreamConnection) -> bool:
        """Keeps a connection for the next call, if there is room."""
        if len(self._idle) >= self.limits.max_idle:
            return False
        self._idle.append(connection)
        return True

    # -- inside

    async def _connect(self, call: Call) -> None:
        loop, connection = asyncio.get_running_loop(), UpstreamConnection(self)
        is_made = False
        try:
            async with clocks.timeout(self.clock, self.limits.connect_timeout_s):
                await loop.create_connection(
                    lambda: connection,
                    self.host,
                    self.port,
                    ssl=self.tls,
                    server_hostname=self._server_name if self.tls else None,
                )
            is_made = True
        except TimeoutError:
            call.task = None
            call.fail(Failure(FailureKind.CONNECT_TIMEOUT, f"no connection to {self.host}:{self.port} in time"))
        except OSError as error:  # refused, unreachable, no such name, a certificate that is not to be trusted
            call.task = None
            call.fail(Failure(FailureKind.REFUSED, f"cannot connect to {self.host}:{self.port}: {error}"))
        finally:
            if not is_made:  # given up in the last moment: uvloop closes what it has told us of, and tells no more
                self.closed(connection)
        if is_made:
            call.task = None
            connection.begin(call)

    def _sweep(self) -> None:
        now = self.clock.now()
        for connection in list(self._connections):
            connection.sweep(now)
        self._sweep_timer = self.clock.call_later(TICK_S, self._sweep) if self._connections else None
