"""The way to the server under load: one streamed answer per call, each read stamped before anything else is done.

It stands on the gateway's HTTP client, which calls back from the event loop with no task or queue in between. While a
load is on, reads are only stamped and kept; `answer` reads what they say once the answer is complete. It knows no API.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from urllib.parse import urlsplit

from penstock.http.call import Failure
from penstock.http.limits import UpstreamLimits
from penstock.http.message import ResponseHead, render
from penstock.http.upstream import Upstream


class RequestFailed(Exception):
    """A request without a usable answer; it is counted by kind, and the load goes on."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Recording:
    """The answer as it came back: `times[i]` is when the socket gave `parts[i]`; they are not aligned to events."""

    __slots__ = ("ended_s", "parts", "sent_s", "status", "times")

    def __init__(self, sent_s: float = 0.0) -> None:
        self.sent_s = sent_s
        self.ended_s = 0.0
        self.status = 0
        self.times: list[float] = []
        self.parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


class Client:
    clock = staticmethod(perf_counter)  # which all stamps of a load are taken from

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, new_connections: bool = False
    ) -> None:
        """`url` may end in /v1 or not. `timeout_s` is how long a server may say nothing. `new_connections`: one for
        every request, as from many clients; else they are kept and used again."""
        self.url = url.rstrip("/").removesuffix("/v1")
        limits = UpstreamLimits(
            connect_timeout_s=min(timeout_s, 30.0),
            first_byte_timeout_s=timeout_s,
            silence_timeout_s=timeout_s,
            keep_alive_s=2.0,  # less than most servers keep one: a request must not meet its closing
        )
        self._upstream = Upstream.from_url(self.url, limits=limits)
        self._path = urlsplit(self.url).path.encode()
        headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream, application/json")]
        if api_key:
            headers.append((b"authorization", b"Bearer " + api_key.encode()))
        if new_connections:
            headers.append((b"connection", b"close"))
        self._headers = render(headers)

    async def post(self, path: str, body: bytes, recording: Recording | None = None) -> Recording:
        """RequestFailed if the server refuses or breaks off; `recording` then holds what had come."""
        return await self._send(b"POST", path, body, recording or Recording())

    async def get(self, path: str) -> Recording:
        return await self._send(b"GET", path, b"", Recording())

    def close(self) -> None:
        self._upstream.close()

    async def _send(self, method: bytes, path: str, body: bytes, recording: Recording) -> Recording:
        receiving = _Receiving(recording, asyncio.get_running_loop().create_future())
        recording.sent_s = perf_counter()
        call = self._upstream.send(method, self._path + path.encode(), self._headers, body, receiving)
        try:
            await receiving.done
        except asyncio.CancelledError:
            call.cancel()
            raise
        if recording.status != 200:
            raise RequestFailed(f"http_{recording.status}", recording.body[:300].decode(errors="replace"))
        return recording


class _Receiving:
    """The gateway's Receiver of one answer."""

    __slots__ = ("_recording", "done")

    def __init__(self, recording: Recording, done: asyncio.Future[None]) -> None:
        self._recording = recording
        self.done = done

    def head(self, head: ResponseHead) -> None:
        self._recording.status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        now = perf_counter()
        recording = self._recording
        if data:
            recording.times.append(now)
            recording.parts.append(data)
        if is_last:
            recording.ended_s = now
            if not self.done.done():
                self.done.set_result(None)

    def failed(self, failure: Failure) -> None:
        self._recording.ended_s = perf_counter()
        if not self.done.done():
            self.done.set_exception(RequestFailed(failure.kind.value, failure.message))
