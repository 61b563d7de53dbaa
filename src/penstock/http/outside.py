"""A file from the internet at large, for a client who names it: bounded in bytes, time and redirects, and never from an
address that is not public.

Names are resolved here, all their addresses are checked, and the connection goes to a checked address and not to the
name: so a name that is resolved anew to another address gains nothing. Targets of redirects are checked likewise.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import urljoin

import httptools

from penstock.core.errors import InvalidImage
from penstock.images.source import Place, is_public, place_of, too_large

_MAX_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_HEAD_BYTES = 32 << 10
_READ_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Outside:
    """Limits of fetching a file: allowed hosts, size, time, addresses."""

    hosts: Sequence[str]  # see `images.source.place_of`
    max_bytes: int
    timeout_s: float  # for all of it
    is_allowed: Callable[[str], bool] = is_public  # whether an address may be connected to
    tls: ssl.SSLContext | None = None  # None: the system's own certificates

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Read from files, which takes a moment: once."""
        return self.tls or ssl.create_default_context()

    async def fetch(self, url: str) -> bytes:
        """Raises InvalidImage."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._fetch(url)
        except TimeoutError:
            problem = f"could not be fetched within {self.timeout_s:g} s"
        except (OSError, UnicodeError, httptools.HttpParserError) as error:
            problem = f"could not be fetched: {_words(error)}"
        raise InvalidImage(problem, reason="fetch")

    async def _fetch(self, url: str) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            place = place_of(url, self.hosts)
            answer = await self._ask(place)
            if answer.status in _REDIRECTS and answer.location:
                url = urljoin(_written(place), answer.location)
                continue
            if answer.status != 200:
                raise InvalidImage(f"could not be fetched: {place.host} answers {answer.status}", reason="fetch")
            return b"".join(answer.parts)
        raise InvalidImage(f"could not be fetched: there are more than {_MAX_REDIRECTS} redirects", reason="fetch")

    async def _ask(self, place: Place) -> _Answer:
        address = await self._address(place)
        tls = self._tls if place.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            address, place.port, ssl=tls, server_hostname=place.host if tls is not None else None
        )
        answer = _Answer(self.max_bytes)
        try:
            writer.write(
                f"GET {place.path} HTTP/1.1\r\nHost: {_authority(place)}\r\nUser-Agent: penstock\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            while not answer.is_complete and (data := await reader.read(_READ_BYTES)):
                answer.feed(data)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                writer.transport.abort()
        if not answer.is_complete and not answer.ends_with_connection:
            raise OSError("the answer broke off")
        return answer

    async def _address(self, place: Place) -> str:
        found = await asyncio.get_running_loop().getaddrinfo(place.host, place.port, proto=6)  # TCP
        addresses = [str(one[4][0]) for one in found]
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise InvalidImage(f"{place.host} is at an address that nothing is fetched from", reason="address")
        return addresses[0]


class _Answer:
    """The response, as far as it is needed: of a redirect only the location. Filled by httptools' callbacks."""

    def __init__(self, max_bytes: int) -> None:
        self.status = 0
        self.location = ""
        self.parts: list[bytes] = []
        self.is_complete = False
        self.ends_with_connection = False  # only that says where it ends
        self._max_bytes = max_bytes
        self._num_bytes = self._idle_bytes = 0
        self._has_length = False
        self._is_coded = False
        self._problem: InvalidImage | None = None
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        known = self._num_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._problem is None:
                raise
        if self._problem is not None:
            raise self._problem
        # Without a body there are headers, before it or behind it, which the parser gathers.
        self._idle_bytes = 0 if self._num_bytes > known else self._idle_bytes + len(data)
        if self._idle_bytes > _MAX_HEAD_BYTES + _READ_BYTES:
            raise OSError("its headers are too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"location":
            self.location = value.decode("ascii", "replace")
        elif name == b"content-length":
            self._has_length = True
            if value.isdigit() and int(value) > self._max_bytes:
                self._problem = too_large(self._max_bytes)
        elif name == b"transfer-encoding":
            self._has_length = True
        elif name == b"content-encoding" and value.lower() != b"identity":
            self._is_coded = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.ends_with_connection = not self._has_length
        if self.status in _REDIRECTS:
            self.is_complete = True
            self._problem = None
        elif self._is_coded:
            self._problem = InvalidImage("could not be fetched: it comes compressed once more", reason="fetch")

    def on_body(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > self._max_bytes:
            self._problem = too_large(self._max_bytes)
        elif self.status == 200 and self._problem is None:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True


def _authority(place: Place) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return host if place.port == _PORTS[place.scheme] else f"{host}:{place.port}"


def _written(place: Place) -> str:
    return f"{place.scheme}://{_authority(place)}{place.path}"


def _words(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)[:200] or type(error).__name__
