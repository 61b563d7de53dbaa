"""A server that takes messages about alerts, and answers them as it is told to."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Sink:
    port: int = 0
    statuses: list[int] = field(default_factory=list)  # of the next answers; then 200
    taken: list[tuple[str, Any]] = field(default_factory=list)  # path and body, of those that were answered with 200
    num_asked: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts of messages in Alertmanager's form, one after another."""
        return [alert for _, body in self.taken for alert in body["alerts"]]


@contextlib.contextmanager
def sinking() -> Iterator[Sink]:
    sink = Sink()

    class Taker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            sink.num_asked += 1
            status = sink.statuses.pop(0) if sink.statuses else 200
            if status == 200:
                sink.taken.append((self.path, body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    server.daemon_threads = True
    sink.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield sink
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
