"""A real HTTP server around an ASGI application, for as long as a test needs it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tests.waiting import GIVE_UP_S, eventually


class Prompt(uvicorn.Server):
    """Ends when it is told to: uvicorn looks ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - it is another thread that says so
            await asyncio.sleep(0.02)


@contextlib.contextmanager
def running(app: Any) -> Iterator[tuple[str, int]]:
    """Serves `app` on a free port from a thread; gives its address."""
    server = Prompt(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started
        host, port = server.servers[0].sockets[0].getsockname()
        yield host, port
    finally:
        server.should_exit = True
        thread.join(GIVE_UP_S)
        assert not thread.is_alive(), "the server did not stop"
