"""One HTTP request as a client makes it, with the time of everything that comes back. Knows nothing of penstock."""

from __future__ import annotations

import asyncio
import json
from time import monotonic
from typing import Any, cast

import httptools


class Call(asyncio.Protocol):
    """A connection with one request on it. Await `ended`; the answer is here, as far as it came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.num_events = 0
        self.is_whole = False  # the answer came to an end by its own framing
        self.asked_s = monotonic()
        self.head_s = self.first_s = self.last_s = self.ended_s = 0.0
        self.longest_gap_s = 0.0
        self.ended: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self.reached: dict[int, asyncio.Future[None]] = {}
        self._parts: list[bytes] = []

    def at_event(self, number: int) -> asyncio.Future[None]:
        """Done when so many events have come, or the answer has ended without them."""
        found = self.reached.setdefault(number, asyncio.get_running_loop().create_future())
        if (self.num_events >= number or self.ended.done()) and not found.done():
            found.set_result(None)
        return found

    def leave(self) -> None:
        self.transport.abort()

    # -- the transport's and the parser's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.asked_s = monotonic()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        for number, future in self.reached.items():
            if self.num_events >= number and not future.done():
                future.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._over()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.head_s = monotonic()

    def on_body(self, part: bytes) -> None:
        now = monotonic()
        if self.first_s:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_s)
        else:
            self.first_s = now
        self.last_s = now
        self.num_events += part.count(b"data: ")
        self._parts.append(part)

    def on_message_complete(self) -> None:
        self.is_whole = True
        self._over()
        self.transport.close()

    def _over(self) -> None:
        if self.ended.done():
            return
        self.body = b"".join(self._parts)
        self.ended_s = monotonic()
        self.ended.set_result(self)
        for future in self.reached.values():
            if not future.done():
                future.set_result(None)

    # -- what it says

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of each, but for the end mark."""
        found = [block for block in self.body.split(b"\n\n") if block.startswith(b"data: ")]
        return [json.loads(block[6:]) for block in found if block != b"data: [DONE]"]

    @property
    def usage(self) -> dict[str, int]:
        if b"text/event-stream" not in self.headers.get("content-type", "").encode():
            return cast(dict[str, int], self.json()["usage"])
        return cast(dict[str, int], next(event["usage"] for event in reversed(self.events()) if event.get("usage")))

    @property
    def text(self) -> str:
        """The text of the first choice of a streamed completion."""
        return "".join(choice["text"] for event in self.events() for choice in event.get("choices", ()))


def post(path: str, body: object, key: str | None = None, **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))} | headers
    if key is not None:
        lines["authorization"] = f"Bearer {key}"
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


async def begin(port: int, request: bytes, host: str = "127.0.0.1") -> Call:
    _, call = await asyncio.get_running_loop().create_connection(lambda: Call(request), host, port)
    return call


async def ask(port: int, request: bytes, timeout_s: float = 120.0, host: str = "127.0.0.1") -> Call:
    call = await begin(port, request, host)
    async with asyncio.timeout(timeout_s):
        return await call.ended
