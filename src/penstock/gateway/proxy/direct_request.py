"""A request of the gateway's own to one replica: a copy of a client's, or a probe.

It passes by limits, queue and bills, and has one try; whoever sent it is told once how it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from penstock.gateway.proxy.journey import Actions, Journey, Leg, Role, Send, Settle
from penstock.gateway.records.facts import Ending
from penstock.health.retries import RetryBudget
from penstock.http import clock as clocks
from penstock.http.exchange import Watcher
from penstock.http.forward import End, Forwarding, Outcome, Tap, forward
from penstock.http.message import ResponseHead
from penstock.http.upstream import Upstream

_NO_RETRIES = RetryBudget(most=0.0)
_MAX_BYTES = 1 << 20  # of a probe's answer

Ended = Callable[[Ending, Outcome | None], None]


class Collected:
    """A sink that keeps what is written, up to a limit; with none, it only counts."""

    def __init__(self, max_bytes: int = 0) -> None:
        self.is_started = False
        self.watcher: Watcher | None = None
        self.body = b""
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def start(
        self, status: int, headers: bytes, *, length: int | None = None, data: bytes = b"", is_last: bool = False
    ) -> None:
        self.is_started = True
        self.write(data)

    def write(self, data: bytes, is_last: bool = False) -> None:
        self.num_bytes += len(data)
        if self.num_bytes <= self._max_bytes:
            self.body += data


class DirectRequest:
    """An `InFlightRequest` at its replica, where it is attached."""

    __slots__ = ("_ended", "_forwarding", "_journey", "_letter", "_outcome", "_sink", "_tap", "_way", "head")

    is_stream = False

    def __init__(self, sink: Collected, ended: Ended, tap: Tap | None = None) -> None:
        """`ended` is told `client_gone` if it was cancelled."""
        self.head: ResponseHead | None = None  # of its answer
        self._sink = sink
        self._ended = ended
        self._tap = tap
        self._journey = Journey(_NO_RETRIES)
        self._forwarding: Forwarding | None = None
        self._outcome: Outcome | None = None

    def send(self, replica_id: str, way: Upstream, target: bytes, headers: bytes, body: bytes) -> None:
        self._way, self._letter = way, (target, headers, body)
        self._run(self._journey.admitted(Leg(Role.WHOLE, replica_id)))

    def cancel(self) -> None:
        if self._forwarding is not None:
            self._forwarding.cancel()
        self._run(self._journey.client_gone())

    def id_to_move(self) -> None:
        """It is about this replica."""

    replica_lost = cancel

    def _run(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                target, headers, body = self._letter
                self._forwarding = forward(
                    self._sink,
                    self._way,
                    target=target,
                    headers=headers,
                    body=body,
                    done=self._done,
                    wanted=self._wanted,
                    started=self._journey.bytes_came,
                    tap=self._tap,
                )
            elif isinstance(action, Settle):  # all others are words for a client
                self._ended(action.ending, self._outcome)

    def _wanted(self, head: ResponseHead) -> bool:
        self.head = head
        return self._journey.head(head.status)

    def _done(self, outcome: Outcome) -> None:
        self._forwarding, self._outcome = None, outcome
        journey, status = self._journey, outcome.status or 0
        if outcome.end is End.COMPLETED:
            self._run(journey.completed(status))
        elif outcome.end is End.DECLINED:
            self._run(journey.declined(status, None, is_lost=False, num_tokens=0, is_resumable=False))
        else:
            self._run(journey.failed(is_lost=False, num_tokens=0, is_resumable=False))


class Asked(Protocol):
    """A replica, as far as a probe knows it."""

    id: str
    upstream: Upstream
    headers: bytes

    def attach(self, request: DirectRequest) -> None: ...

    def detach(self, request: DirectRequest) -> None: ...


async def ask(
    replica: Asked, target: bytes, body: bytes, *, timeout_s: float, headers: bytes = b""
) -> tuple[int, bytes] | None:
    """Status and body of a replica's answer; no status: the replica was lost meanwhile. None: there is no answer.
    `headers`: besides the replica's own."""
    sink = Collected(_MAX_BYTES)
    ended: asyncio.Future[tuple[Ending, Outcome | None]] = asyncio.get_running_loop().create_future()

    def tell(ending: Ending, outcome: Outcome | None) -> None:
        if not ended.done():
            ended.set_result((ending, outcome))

    request = DirectRequest(sink, tell)
    replica.attach(request)
    try:
        request.send(replica.id, replica.upstream, target, replica.headers + headers, body)
        async with clocks.timeout(replica.upstream.clock, timeout_s):
            ending, outcome = await ended
    except TimeoutError:
        return None
    finally:
        replica.detach(request)
        request.cancel()
    if ending is Ending.CLIENT_GONE:
        return 0, b""
    if outcome is None or outcome.status is None or outcome.failure is not None or sink.num_bytes > _MAX_BYTES:
        return None
    return outcome.status, sink.body
