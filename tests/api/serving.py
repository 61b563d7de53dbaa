"""A real HTTP server around an ASGI application, for as long as a test needs it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn


@contextlib.contextmanager
def running(app: Any) -> Iterator[tuple[str, int]]:
    """Serves `app` on a free port from a thread; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 10
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        host, port = server.servers[0].sockets[0].getsockname()
        yield host, port
    finally:
        server.should_exit = True
        thread.join(timeout=10)
