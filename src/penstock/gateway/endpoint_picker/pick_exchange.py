"""A request of which Envoy asks where it goes, as the gateway sees it: an exchange that is answered with a destination,
or with the refusal that the gateway would have written to its client."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.http.exchange import Exchange, NoChannel
from penstock.http.message import Request

HeaderPairs = Sequence[tuple[str, bytes]]


class ResponseObserver(Protocol):
    """Told of a response that Envoy passes by."""

    def answered(self, status: int, headers: Mapping[str, bytes], served: str | None) -> HeaderPairs:
        """Its head has come, from the endpoint that `served` it, if Envoy says so. Returns headers for its client."""

    def data(self, chunk: bytes) -> None: ...

    def ended(self) -> None: ...


class Destination(NamedTuple):
    endpoints: tuple[str, ...]  # ip:port, the picked one first
    headers: HeaderPairs = ()  # of the request, that are set
    removed: Sequence[str] = ()
    body: bytes | None = None  # as the replica is to get it; None: as it came
    observer: ResponseObserver | None = None


class Refusal(NamedTuple):
    status: int
    headers: HeaderPairs
    body: bytes
    reason: str  # from a fixed set


class PickExchange(Exchange):
    __slots__ = ("answer", "reason", "subset")

    def __init__(self, request: Request, subset: frozenset[str] | None) -> None:
        """`subset`: the endpoints that it may go to, as ip:port or ip; None: all."""
        super().__init__(NoChannel(), request, keep_alive=False, speaks_chunked=False)
        self.subset = subset
        self.reason = ""  # of a refusal
        self.answer: asyncio.Future[Destination | Refusal] = asyncio.get_running_loop().create_future()

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self.is_started = True
        self._settle(Refusal(status, header_pairs(headers), data, self.reason))

    def write(self, data: bytes, is_last: bool = False) -> None:
        """Nothing: a refusal is whole when it starts."""

    def goes_to(self, destination: Destination) -> None:
        self._settle(destination)

    def _settle(self, answer: Destination | Refusal) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


def header_pairs(lines: bytes) -> list[tuple[str, bytes]]:
    """Header lines as `message.render` makes them, in pairs."""
    pairs = (line.partition(b": ") for line in lines.split(b"\r\n") if line)
    return [(name.decode(), value) for name, _, value in pairs]
