"""One request to a server and its whole answer, for commands and threads: no event loop, and no connection is kept."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

_MAX_BYTES = 8 << 20


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


def ask(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> Answered:
    """`path` is added to the URL's own; `server_name` is what the certificate must be good for, if not the URL's host.
    Raises `OSError` or `http.client.HTTPException`."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme == "https":
        found: http.client.HTTPConnection = _NamedConnection(place, timeout_s, tls, server_name)
    else:
        found = http.client.HTTPConnection(place, timeout=timeout_s)
    with contextlib.closing(found) as connection:
        connection.request(method, f"{parts.path.rstrip('/')}{path}", body, dict(headers or {}))
        answer = connection.getresponse()
        lowered = {name.lower(): value for name, value in answer.getheaders()}
        return Answered(answer.status, lowered, answer.read(_MAX_BYTES))


class _NamedConnection(http.client.HTTPSConnection):
    def __init__(self, place: str, timeout_s: float, tls: ssl.SSLContext | None, server_name: str | None) -> None:
        self._tls = tls or ssl.create_default_context()
        super().__init__(place, timeout=timeout_s, context=self._tls)
        self._server_name = server_name or self.host

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)
