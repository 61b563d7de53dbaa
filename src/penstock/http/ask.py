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
) -> Answered:
    """`path` is added to the URL's own. Raises `OSError` or `http.client.HTTPException`."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    if parts.scheme == "https":
        found: http.client.HTTPConnection = http.client.HTTPSConnection(place, timeout=timeout_s, context=tls)
    else:
        found = http.client.HTTPConnection(place, timeout=timeout_s)
    with contextlib.closing(found) as connection:
        connection.request(method, f"{parts.path.rstrip('/')}{path}", body, dict(headers or {}))
        answer = connection.getresponse()
        lowered = {name.lower(): value for name, value in answer.getheaders()}
        return Answered(answer.status, lowered, answer.read(_MAX_BYTES))
