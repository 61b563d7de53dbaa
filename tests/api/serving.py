"""The real HTTP server around an ASGI application, for as long as a test needs it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from penstock.http.asgi import AsgiApp
from penstock.http.clock import LOOP_CLOCK, TimerClock
from penstock.http.limits import ClientLimits
from penstock.http.server import App, Server, bound_socket
from penstock.websocket.endpoint import PATHS
from tests.waiting import GIVE_UP_S


@contextlib.contextmanager
def running(
    app: Any,
    limits: ClientLimits | None = None,
    clock: TimerClock = LOOP_CLOCK,
    front: Callable[[App], App] = lambda app: app,
) -> Iterator[tuple[str, int]]:
    """Serves `app` on a free port from a thread; gives its address."""
    started = threading.Event()
    found: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    listener = bound_socket("127.0.0.1", 0)
    host, port = listener.getsockname()

    async def serve() -> None:
        served, told = AsgiApp(app), asyncio.Event()
        server = Server(front(served), limits, clock, upgrades=PATHS)
        async with served.lifespan():
            await server.listen(listener)
            found.append((asyncio.get_running_loop(), told))
            started.set()
            await told.wait()
            await server.stop(GIVE_UP_S)

    def run() -> None:
        try:
            uvloop.run(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(GIVE_UP_S)
        assert found, "the server did not start"
        yield host, port
    finally:
        for loop, told in found:
            loop.call_soon_threadsafe(told.set)
        thread.join(GIVE_UP_S)
        assert not thread.is_alive(), "the server did not stop"
