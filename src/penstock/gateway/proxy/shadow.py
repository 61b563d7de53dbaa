"""Copies of requests for a version that is tried on real traffic: sent, read to the end, and dropped.

A copy is sent once the client has its answer, so it cannot delay that; nobody is charged for it, and metrics are all
that comes of it. Copies take what is left: they are not sent to a replica that has half of what it can take, and as
soon as a request has to wait for the version they are cut off.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.api.relay import StreamRecord
from penstock.core.errors import PenstockError
from penstock.core.replica import ReplicaState
from penstock.gateway.proxy.routed_request import RoutedRequest
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from penstock.gateway.replicas.replica import STREAM_HEADER, Replica
from penstock.gateway.tokens.request_size import Size, body_for
from penstock.http.call import Call, Failure
from penstock.http.message import ResponseHead

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway

MOST_OPEN = 64
MAX_BODY_BYTES = 128 << 10  # a larger one takes too long to write anew on the event loop, for what is only a trial
_TAIL_BYTES = 8192


class Shadows:
    """Those of one gateway. Belongs to the event loop."""

    def __init__(self, gateway: Gateway, most_open: int = MOST_OPEN) -> None:
        self._gateway = gateway
        self._most_open = most_open
        self._open: set[Copy] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def mirror(self, routed: RoutedRequest, pool: str, output: int | None) -> None:
        """What `pool` has answered; `output`: the limit of one choice."""
        for other in routed.route.shadows(routed.lot, pool):
            replica = self._free_replica(other) if len(routed.body) <= MAX_BODY_BYTES else None
            if replica is None:
                self._gateway.recorder.shadowed(other, time.time(), "dropped", None, None, None)
                continue
            path, namespace = routed.surface.path, routed.caller.tenant.namespace
            size = Size(self._gateway.pools[other], path, routed.body, routed.view, output, namespace)
            try:
                self._open.add(Copy(self, other, routed, replica, body_for(routed, size, routed.route)))
            except PenstockError:  # a server of another kind must not be sent it
                self._gateway.recorder.shadowed(other, time.time(), "dropped", None, None, None)

    def give_way(self, pool: str) -> None:
        """A request has to wait for this pool."""
        for copy in [copy for copy in self._open if copy.pool == pool]:
            copy.cut_off()

    def close(self) -> None:
        for copy in list(self._open):
            copy.cut_off()

    def ended(
        self, copy: Copy, outcome: str, usage: TokenUsage | None, ttft_s: float | None, total_s: float | None
    ) -> None:
        self._open.discard(copy)
        self._gateway.recorder.shadowed(copy.pool, time.time(), outcome, usage, ttft_s, total_s)

    def _free_replica(self, pool: str) -> Replica | None:
        """The one with the least to do, if it has not too much already; None: a copy would be in somebody's way."""
        admission, now = self._gateway.admission, self._gateway.now()
        if len(self._open) >= self._most_open or admission.num_waiting(pool):
            return None
        free = [
            seen
            for seen in admission.replicas(pool)
            if seen.state_at(now) is ReplicaState.READY
            and not (seen.is_tripped or seen.load.num_queued)
            and 2 * seen.sequences < seen.max_sequences
            and 2 * seen.kv_used_tokens < seen.limits.kv_capacity_tokens
        ]
        copies = [copy.replica.id for copy in self._open]
        if not free:
            return None
        return self._gateway.replicas[min(free, key=lambda seen: (seen.queue_s, copies.count(seen.id))).id]


class Copy:
    """Receives an answer that nobody waits for."""

    __slots__ = (
        "_began_s",
        "_call",
        "_held",
        "_is_stream",
        "_now",
        "_owner",
        "_record",
        "_status",
        "_tail",
        "_ttft_s",
        "pool",
        "replica",
    )

    def __init__(self, owner: Shadows, pool: str, routed: RoutedRequest, replica: Replica, body: bytes) -> None:
        self.pool = pool
        self.replica = replica
        self._owner = owner
        self._is_stream = bool(routed.view.stream)
        self._status = 0
        self._tail = b""
        self._held = b""
        self._ttft_s: float | None = None
        self._record: StreamRecord | None = None
        tenant, relayed = routed.caller.tenant, b""
        if replica.relays and self._is_stream:
            relayed, self._record = STREAM_HEADER, StreamRecord()  # counts the tokens of a stream without usage
        headers = replica.headers_for(tenant, relayed=relayed)
        self._now = replica.upstream.clock.now
        self._began_s = self._now()
        way = replica.way(tenant, routed.surface.path, body)
        self._call: Call | None = way.send(b"POST", routed.surface.path, headers, body, self)

    def cut_off(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self._owner.ended(self, "cut_off", None, None, None)

    def head(self, head: ResponseHead) -> None:
        self._status = head.status

    def data(self, data: bytes, is_last: bool) -> None:
        if data and self._ttft_s is None:
            self._ttft_s = self._now() - self._began_s
        if self._record is not None:
            self._follow(self._record, data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if is_last:
            self._end("ok" if self._status == 200 else "failed")

    def failed(self, failure: Failure) -> None:
        self._end("failed")

    def _follow(self, record: StreamRecord, data: bytes) -> None:
        """A record takes whole events."""
        data = self._held + data
        end = data.rfind(b"\n\n") + 1
        self._held = data[end + 1 :] if end else data
        if end:
            record.append(data[: end + 1])

    def _end(self, outcome: str) -> None:
        if self._call is None:
            return
        self._call = None
        usage = find_usage(self._tail) if outcome == "ok" else None
        if usage is None and self._record is not None and (prompt := self._record.prompt_tokens) is not None:
            usage = TokenUsage(prompt, *self._record.counts)
        self._owner.ended(self, outcome, usage, self._ttft_s if self._is_stream else None, self._now() - self._began_s)
