"""A small web server on a local port: files with ETags and ranges, and what can go wrong with them."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class LocalWeb:
    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # by path
        self.moved: dict[str, str] = {}  # redirects, by path
        self.takes_ranges = True
        self.tells_versions = True
        self.authorization: str | None = None  # what every request must bring
        self.cuts: list[int] = []  # the next replies with more than a byte end after so many
        self.statuses: list[int] = []  # of the next replies to requests for more than a byte
        self.stalls_after: int | None = None  # replies with more than a byte; the next ones come to a stand halfway
        self.requests: list[tuple[str, str | None]] = []  # path, Range
        self.is_stalled = threading.Event()
        self._go_on = threading.Event()
        self._lock = threading.Lock()
        web = self

        class Answer(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                web._answer(self)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._go_on.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, path: str) -> list[str | None]:
        """Ranges in which a file was asked for, but for the first byte."""
        return [range for asked, range in self.requests if asked == path and range != "bytes=0-0"]

    def _answer(self, http: BaseHTTPRequestHandler) -> None:
        path, range = http.path.partition("?")[0], http.headers.get("Range")
        with self._lock:
            self.requests.append((path, range))
            is_probe = range == "bytes=0-0"
            status = self.statuses.pop(0) if self.statuses and not is_probe else 200
            cut = self.cuts.pop(0) if self.cuts and not is_probe else None
            stalls = self.stalls_after == 0 and not is_probe
            if self.stalls_after and not is_probe:
                self.stalls_after -= 1
        content = self.files.get(path)
        if self.authorization is not None and http.headers.get("Authorization") != self.authorization:
            return _send(http, 401, {}, b"")
        if path in self.moved:
            return _send(http, 302, {"Location": self.moved[path]}, b"")
        if content is None:
            return _send(http, 404, {}, b"nothing here")
        if status != 200:
            return _send(http, status, {"Retry-After": "7"}, b"not now")
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'} if self.tells_versions else {}
        if range is None or not self.takes_ranges:
            return self._send_cut(http, 200, headers, content, cut, stalls)
        first, last = map(int, range.removeprefix("bytes=").split("-"))
        if first >= len(content):
            return _send(http, 416, headers | {"Content-Range": f"bytes */{len(content)}"}, b"")
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        self._send_cut(http, 206, headers, content[first : last + 1], cut, stalls)

    def _send_cut(
        self,
        http: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        cut: int | None,
        stalls: bool,
    ) -> None:
        _send(http, status, headers, content, len(content) // 2 if stalls else cut)
        if stalls:
            self.is_stalled.set()
            self._go_on.wait()
        http.close_connection = stalls or cut is not None


@contextmanager
def local_web() -> Iterator[LocalWeb]:
    web = LocalWeb()
    try:
        yield web
    finally:
        web.close()


def contents(directory: Path) -> dict[str, bytes]:
    """A model's files by their names."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def _send(
    http: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, cut: int | None = None
) -> None:
    http.send_response(status)
    for name, value in headers.items():
        http.send_header(name, value)
    http.send_header("Content-Length", str(len(content)))
    http.end_headers()
    with contextlib.suppress(ConnectionError):  # of a client that was killed
        http.wfile.write(content[:cut])
        http.wfile.flush()
