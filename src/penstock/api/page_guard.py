"""Web pages are kept away from servers that ask for no key: a browser on this machine, or behind its firewall, would
send a foreign page's requests to them.

A page of another origin is known by its `Origin` or `Sec-Fetch-Site`. One that hides behind a name of its own which
resolves to this machine (DNS rebinding) is known by that name, its `Host`. Clients that are no browsers send neither
`Origin` nor `Sec-Fetch-Site`, and call a server by its address or a name that its operator knows.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from penstock.core.errors import PermissionDenied

Headers = Mapping[bytes, bytes]  # by lower-case name

_PORT = re.compile(r":\d+\Z")


def is_loopback(host: str) -> bool:
    """An address to listen on that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_foreign_page(headers: Headers, allowed: Collection[str] = ()) -> bool:
    """Whether a browser sends this for a page of another origin. `allowed`: names whose pages are taken for our own."""
    is_other_site = headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site")
    origin = headers.get(b"origin")
    if origin is None:
        return is_other_site
    authority = _text(origin).partition("://")[2]
    if allowed and _name(authority) in allowed:
        return False
    return is_other_site or not authority or authority != _text(headers.get(b"host", b""))


class PageGuard:
    """A guard of a server that listens on `host`. `allowed_hosts`: names by which browsers and others may call it;
    `allowed_origins`: those of pages that may use it (`http.cors`)."""

    def __init__(
        self, host: str = "127.0.0.1", allowed_hosts: Iterable[str] = (), allowed_origins: Iterable[str] = ()
    ) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allowed_origins)
        self._allowed = frozenset(name.lower() for name in allowed_hosts)
        self._names = self._allowed | {"localhost", host.lower()}
        # Beyond this machine a server has names that only its operator knows.
        self._takes_any_name = not self._allowed and not is_loopback(host)

    def check(self, headers: Headers) -> None:
        """Raises PermissionDenied for a request that a foreign page sent, or may have sent."""
        self.check_origin(headers)
        host = _text(headers.get(b"host", b""))
        if host and not self._takes_any_name and not self._is_own(_name(host)):
            raise PermissionDenied("this server is called by its address, as localhost, or by a name in allowed_hosts")

    def check_origin(self, headers: Headers) -> None:
        """Raises PermissionDenied for a page of an origin that is neither the server's own nor allowed."""
        if is_foreign_page(headers, self._allowed) and not self._is_allowed(headers.get(b"origin")):
            raise PermissionDenied("web pages of other origins may not use this server; allowed_origins names others")

    def _is_allowed(self, origin: bytes | None) -> bool:
        return origin is not None and ("*" in self._origins or _text(origin) in self._origins)

    def _is_own(self, name: str) -> bool:
        return name in self._names or _is_address(name)


def _text(value: bytes) -> str:
    return value.decode("latin-1").lower()


def _name(authority: str) -> str:
    """The host of an authority, without its port and without the brackets of an IPv6 address."""
    name = _PORT.sub("", authority)
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


@lru_cache(maxsize=256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
