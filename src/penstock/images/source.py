"""Bytes of an image as a request names them: a data: URL holds them; any other URL has to be fetched, where it may be.

A content type is not believed: what the bytes are, `decode` finds out.
"""

from __future__ import annotations

import binascii
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from penstock.core.errors import InvalidImage

_DATA = "data:"
_REMOTE = ("http:", "https:")
_MAX_SHOWN = 100  # characters of a URL that an error repeats
_MAX_ESCAPES = 256  # of characters of a data: URL
_MAX_URL = 8192  # characters of one that is fetched
_PORTS = {"http": 80, "https": 443}

ANY_HOST = "*"


def is_data(url: str) -> bool:
    return url[: len(_DATA)].lower() == _DATA


def data_bytes(url: str, max_bytes: int) -> bytes:
    """Bytes of a data: URL. Raises InvalidImage."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidImage("is a data: URL without base64", reason="url")
    if len(body) > 2 * max_bytes + _MAX_ESCAPES:  # base64 takes a third more
        raise too_large(max_bytes)
    if "%" in body:
        body = _unescaped(body)
    try:
        data = binascii.a2b_base64(body, strict_mode=True)
    except ValueError as error:  # binascii.Error is one, and so is what text beyond ASCII raises
        raise InvalidImage(f"is not valid base64: {error}", reason="base64") from None
    if not data:
        raise InvalidImage("has no bytes", reason="empty")
    if len(data) > max_bytes:
        raise too_large(max_bytes)
    return data


def _unescaped(body: str) -> str:
    """Padding and a few other signs may be escaped."""
    if body.count("%") > _MAX_ESCAPES:
        raise InvalidImage("is not valid base64: it has too many escaped characters", reason="base64")
    return unquote(body)


def too_large(max_bytes: int) -> InvalidImage:
    return InvalidImage(f"is larger than {max_bytes} bytes, the most that are taken", reason="bytes")


@dataclass(frozen=True)
class Place:
    """Destination of a URL."""

    scheme: str
    host: str  # a name or an address, without brackets
    port: int
    path: str  # with its query


def place_of(url: str, allowed: Sequence[str]) -> Place:
    """Destination of a URL that may be fetched. Raises InvalidImage, which says what may be.

    `allowed`: hosts, each the name itself, `*.example.com` for all names below it, or `*` for any; with `:port` for one
    that is not the scheme's own.
    """
    shown = url[:_MAX_SHOWN] + ("…" if len(url) > _MAX_SHOWN else "")
    if not url.lower().startswith(_REMOTE):
        raise InvalidImage(f"{shown!r} is neither a data: URL nor an http(s): one", reason="url")
    if not allowed:
        raise InvalidImage("this server fetches no images: send them as data: URLs", reason="remote")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise InvalidImage(f"{shown!r} is not a URL", reason="url") from None
    is_plain = url.isascii() and url.isprintable() and " " not in url
    if not host or not is_plain or len(url) > _MAX_URL or "@" in parts.netloc or "\\" in url:
        raise InvalidImage(f"{shown!r} is not a URL that is fetched here", reason="url")
    place = Place(parts.scheme, host, port or _PORTS[parts.scheme], _path_of(parts.path, parts.query))
    if not any(_is_allowed(place, entry) for entry in allowed):
        raise InvalidImage(f"this server fetches no images from {host[:_MAX_SHOWN]}", reason="remote")
    return place


def _path_of(path: str, query: str) -> str:
    return (path or "/") + (f"?{query}" if query else "")


def _is_allowed(place: Place, entry: str) -> bool:
    name, colon, port = entry.rpartition(":")
    if not colon or not port.isdigit():  # an address of version 6 has colons too
        name, port = entry, ""
    if place.port != (int(port) if port else _PORTS[place.scheme]):
        return False
    name = name.strip("[]").lower()
    if name.startswith("*."):
        return place.host.endswith(name[1:])
    return name in (ANY_HOST, place.host)


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")  # which Python calls private only lately
_TRANSLATED = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


def is_public(address: str) -> bool:
    """Whether an address is one of the internet at large: not of this machine, of a private or a link-local network,
    nor one that another protocol would translate into such a one."""
    try:
        found: _Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour or found.teredo or found.is_site_local or _is_translated(found):
            return False
    if found in _PROTOCOLS:
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


def _is_translated(address: ipaddress.IPv6Address) -> bool:
    """Whether the address stands for an IPv4 one: by NAT64, or in the deprecated form ::a.b.c.d."""
    return any(address in network for network in _TRANSLATED) or int(address) >> 32 == 0
