"""Copies of requests for a version that is tried on real traffic: sent, read to the end, and dropped.

A copy is sent once the client has its answer, so it cannot delay that; nobody is charged for it, and metrics are all
that comes of it. Copies take what is left: they are not sent to a replica that has half of what it can take, and as
soon as a request has to wait for the version they are cut off.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from penstock.admission.admission import Admission
from penstock.api.relay import StreamRecord
from penstock.core.errors import PenstockError
from penstock.core.replica import ReplicaState
from penstock.gateway.proxy.direct_request import Collected, DirectRequest
from penstock.gateway.proxy.routed_request import RoutedRequest, body_for
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from penstock.gateway.replicas.replica import STREAM_HEADER, Replica
from penstock.gateway.tokens.request_size import Pool, Size
from penstock.http.clock import TimerClock
from penstock.http.forward import Outcome

MAX_OPEN = 64
MAX_BODY_BYTES = 128 << 10  # a larger one takes too long to write anew on the event loop, for what is only a trial


class Shadows:
    """Those of one gateway. Belongs to the event loop."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        pools: Mapping[str, Pool],
        admission: Admission,
        recorder: GatewayRecorder,
        clock: TimerClock,
        most_open: int = MAX_OPEN,
    ) -> None:
        self._replicas = replicas
        self._pools = pools
        self._admission = admission
        self._recorder = recorder
        self._clock = clock
        self._most_open = most_open
        self._open: set[Copy] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def mirror(self, routed: RoutedRequest, pool: str, output: int | None) -> None:
        """Sends copies of a request that `pool` has answered; `output`: the limit of one choice."""
        for other in routed.route.shadows(routed.bucket, pool):
            replica = self._free_replica(other) if len(routed.body) <= MAX_BODY_BYTES else None
            if replica is None:
                self._recorder.shadowed(other, time.time(), "dropped", None, None, None)
                continue
            path, namespace = routed.surface.path, routed.caller.tenant.namespace
            size = Size(self._pools[other], path, routed.body, routed.view, output, namespace)
            try:
                self._open.add(Copy(self, other, routed, replica, body_for(routed, size, routed.route)))
            except PenstockError:  # a server of another kind must not be sent it
                self._recorder.shadowed(other, time.time(), "dropped", None, None, None)

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
        self._recorder.shadowed(copy.pool, time.time(), outcome, usage, ttft_s, total_s)

    def _free_replica(self, pool: str) -> Replica | None:
        """The one with the least to do, if it has not too much already; None: a copy would be in somebody's way."""
        admission, now = self._admission, self._clock.now()
        if len(self._open) >= self._most_open or admission.num_waiting(pool):
            return None
        free = [
            seen
            for seen in admission.replicas(pool)
            if seen.state_at(now) is ReplicaState.READY
            and not (seen.is_tripped or seen.load.num_queued or seen.role == "prefill" or seen.needs_peer)
            and 2 * seen.sequences < seen.max_sequences
            and 2 * seen.kv_used_tokens < seen.limits.kv_capacity_tokens
        ]
        copies = [copy.replica.id for copy in self._open]
        if not free:
            return None
        return self._replicas[min(free, key=lambda seen: (seen.queue_s, copies.count(seen.id))).id]


class Copy:
    """One copy, from its sending to its end."""

    __slots__ = ("_is_stream", "_owner", "_record", "_request", "pool", "replica")

    def __init__(self, owner: Shadows, pool: str, routed: RoutedRequest, replica: Replica, body: bytes) -> None:
        self.pool = pool
        self.replica = replica
        self._owner = owner
        self._is_stream = bool(routed.view.stream)
        self._record: StreamRecord | None = None
        tenant, target, relayed = routed.caller.tenant, routed.surface.path, b""
        if replica.relays and self._is_stream:
            relayed, self._record = STREAM_HEADER, StreamRecord()  # counts the tokens of a stream without usage
        headers, way = replica.headers_for(tenant, relayed=relayed), replica.way(tenant, target, body)
        tap = self._record.append if self._record is not None else None
        self._request = DirectRequest(Collected(), self._ended, tap)
        self._request.send(replica.id, way, target, headers, body)

    def cut_off(self) -> None:
        self._request.cancel()

    def _ended(self, ending: Ending, outcome: Outcome | None) -> None:
        if ending is Ending.CLIENT_GONE:
            self._owner.ended(self, "cut_off", None, None, None)
            return
        assert outcome is not None
        usage = find_usage(outcome.tail) if ending is Ending.OK else None
        if usage is None and self._record is not None and (prompt := self._record.prompt_tokens) is not None:
            usage = TokenUsage(prompt, *self._record.counts)
        ttft_s = outcome.first_byte_s if self._is_stream else None
        self._owner.ended(self, "ok" if ending is Ending.OK else "failed", usage, ttft_s, outcome.total_s)
