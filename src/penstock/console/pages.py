"""The page as files in memory: built once (`make console`), committed, and sent as they are. Knows no server.

The page may run its own script and style and speak with its own origin, and nothing else: a script that found its way
into a name or a reason would not run.
"""

from __future__ import annotations

import gzip
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SAFE_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
PREFIX = "/console/"


class Page(NamedTuple):
    headers: list[tuple[bytes, bytes]]
    etag: bytes
    plain: bytes
    gzipped: bytes

    def answer(self, accepts: bytes, known: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Status, headers, body; `accepts` and `known` are the request's accept-encoding and if-none-match."""
        if self.etag in known:
            return 304, self.headers, b""
        if b"gzip" in accepts:
            return 200, [*self.headers, (b"content-encoding", b"gzip")], self.gzipped
        return 200, self.headers, self.plain


def owns(path: str) -> bool:
    return path == "/" or path.startswith(PREFIX)


def load_pages() -> dict[str, Page]:
    """Returns the pages by the path they are served at."""
    found = {}
    for file in files("penstock.console").joinpath("assets").iterdir():
        ending = file.name.rpartition(".")[2]
        if ending in _TYPES:
            path = "/" if file.name == "index.html" else PREFIX + file.name
            found[path] = _page(file.read_bytes(), _TYPES[ending])
    return found


def _page(content: bytes, kind: str) -> Page:
    etag = b'"%b"' % sha256(content).hexdigest()[:16].encode()
    headers = [
        (b"content-type", kind.encode()),
        (b"etag", etag),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept-encoding"),
        *SAFE_HEADERS,
    ]
    return Page(headers, etag, content, gzip.compress(content, 9, mtime=0))
