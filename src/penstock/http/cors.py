"""Cross-origin resource sharing: browsers ask whether pages of another origin may use the API, and are told.

Only paths under /v1/ are shared. A preflight is answered here; of all other requests the answer gets the header that
lets a page read it. Whether the request is served at all is for keys to decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.http.exchange import Exchange

ANY = "*"
_SHARED = b"/v1/"
_READABLE = b"x-request-id, request-id, retry-after, server-timing, x-penstock-replica, x-penstock-route"
_PREFLIGHT_AGE_S = 600


class Cors:
    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: as browsers write them, `https://chat.example`, or `*` for all."""
        self._origins = frozenset(origin.rstrip("/").lower().encode() for origin in origins)
        self._takes_any = ANY.encode() in self._origins

    @classmethod
    def of(cls, origins: Sequence[str]) -> Cors | None:
        """None: no page of another origin may read an answer."""
        return cls(origins) if origins else None

    def answer(self, exchange: Exchange) -> bool:
        """True: it was a preflight, and is answered. If False, the exchange's answer will have its headers."""
        request = exchange.request
        origin = request.headers.get(b"origin")
        if origin is None or not request.path.startswith(_SHARED):
            return False
        if not (self._takes_any or origin.lower() in self._origins):
            return False
        allowed = b"access-control-allow-origin: %b\r\nvary: origin\r\n" % origin
        if request.method == b"OPTIONS" and b"access-control-request-method" in request.headers:
            headers = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
            exchange.respond(
                204,
                b"%baccess-control-allow-methods: GET, POST, DELETE\r\naccess-control-allow-headers: %b\r\n"
                b"access-control-max-age: %d\r\n" % (allowed, headers, _PREFLIGHT_AGE_S),
                b"",
            )
            return True
        exchange.page_headers = b"%baccess-control-expose-headers: %b\r\n" % (allowed, _READABLE)
        return False
