"""Copies of requests for a version that is tried on real traffic: sent, read to the end, and dropped.

A copy is sent once the client has its answer, so it cannot delay that; nobody is charged for it, and metrics are all
that comes of it. Copies take what is left: they are not sent to a replica that has half of what it can take, and as
soon as a request has to wait for the version they are cut off.

Where a rollout asks for a control, the request is copied to both its versions, one after the other (`rollouts.pairs`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from penstock.admission.admission import Admission
from penstock.api.relay import COST_HEADER, StreamRecord, read_cost
from penstock.core.errors import PenstockError
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.core.request import Cost
from penstock.gateway.proxy.direct_request import Collected, DirectRequest
from penstock.gateway.proxy.routed_request import RoutedRequest, body_for
from penstock.gateway.records.facts import Ending
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.records.token_usage import TokenUsage, find_usage
from penstock.gateway.replicas.replica import STREAM_HEADER, Replica
from penstock.gateway.rollouts.load import LoadMeter
from penstock.gateway.rollouts.observed_request import ObservedRequest
from penstock.gateway.rollouts.pairs import PairedCopies
from penstock.gateway.tokens.request_size import Pool, Size
from penstock.http.clock import TimerClock
from penstock.http.forward import Outcome
from penstock.router.routes import Target
from penstock.tenancy.tenants import Tenant

MAX_OPEN = 64
MAX_BODY_BYTES = 128 << 10  # a larger one takes too long to write anew on the event loop, for what is only a trial
_COST_HEADER = COST_HEADER.encode()


class CopyEnd(NamedTuple):
    """The end of a copy."""

    outcome: str  # ok, failed or cut_off
    replica: str
    in_flight: int  # other requests at the replica, in the mean
    status: int | None = None  # None: no answer began
    usage: TokenUsage | None = None
    ttft_s: float | None = None  # of streams
    total_s: float | None = None
    device_s: float | None = None
    body: bytes = b""  # as far as it was to be kept
    is_whole: bool = True  # all of it was kept


Told = Callable[[CopyEnd], None]


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
        random: Random | None = None,
    ) -> None:
        """`random` draws which of two versions is sent its copy first."""
        self._replicas = replicas
        self._pools = pools
        self._admission = admission
        self._recorder = recorder
        self._clock = clock
        self._most_open = most_open
        self._random = random or Random()
        self._open: set[Copy] = set()
        self._pairs: set[PairedCopies] = set()
        self.compare: Callable[[PairedCopies], object] = lambda pair: None  # told of each pair that has ended

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_pairs(self) -> int:
        """Requests that are being copied to both versions of a rollout."""
        return len(self._pairs)

    def mirror(self, routed: RoutedRequest, version: str, output: int | None) -> None:
        """Sends copies of a request that `version` has answered; `output`: the limit of one choice."""
        seen = routed.observed
        for other in routed.route.shadows(routed.bucket, version):
            if seen is not None and seen.is_copied and other.version == seen.rollout.new_version:
                self._begin_pair(routed, seen, other, output)
            else:
                self.send(other, routed, output)

    def _begin_pair(self, routed: RoutedRequest, seen: ObservedRequest, new: Target, output: int | None) -> None:
        """One pair is as much as two copies, so that no second one finds no room."""
        targets = [seen.rollout.old_target(routed.bucket), new]
        if 2 * len(self._pairs) >= self._most_open or any(self.free_replica(one) is None for one in targets):
            for one in targets:
                self._recorder.shadowed(one.version, time.time(), "dropped", None, None, None)
            return
        self._random.shuffle(targets)
        answer, took_s = seen.answer(), seen.total_s
        pair = PairedCopies(self, routed, seen.rollout, targets, output, answer, took_s, self._clock, self._pair_ended)
        self._pairs.add(pair)
        pair.begin()

    def _pair_ended(self, pair: PairedCopies) -> None:
        self._pairs.discard(pair)
        self.compare(pair)

    def send(
        self,
        target: Target,
        routed: RoutedRequest,
        output: int | None,
        *,
        tenant: Tenant | None = None,
        max_kept: int = 0,
        told: Told | None = None,
    ) -> Copy | None:
        """The copy; None: there was no room for it. `tenant`: whom replicas take it to be of, if that is not its own;
        `max_kept`: bytes of its answer that are kept."""
        seen = self.free_replica(target) if len(routed.body) <= MAX_BODY_BYTES else None
        if seen is None:
            self._recorder.shadowed(target.version, time.time(), "dropped", None, None, None)
            return None
        path, tenant = routed.surface.path, tenant or routed.caller.tenant
        size = Size(self._pools[target.pool], path, routed.body, routed.view, output, tenant.namespace)
        try:
            body = body_for(routed, size, target.adapter)
            replica = self._replicas[seen.id]
            copy = Copy(self, target, routed, tenant, replica, LoadMeter(replica, seen.sequences), body, max_kept, told)
        except PenstockError:  # a server of another kind must not be sent it
            self._recorder.shadowed(target.version, time.time(), "dropped", None, None, None)
            return None
        self._open.add(copy)
        return copy

    def give_way(self, pool: str) -> None:
        """A request has to wait for this pool."""
        for copy in [copy for copy in self._open if copy.target.pool == pool]:
            copy.cut_off()

    def close(self) -> None:
        for pair in self._pairs:
            pair.cancel()
        for copy in list(self._open):
            copy.cut_off()

    def ended(self, copy: Copy, end: CopyEnd) -> None:
        self._open.discard(copy)
        self._recorder.shadowed(copy.target.version, time.time(), end.outcome, end.usage, end.ttft_s, end.total_s)

    def free_replica(self, target: Target) -> ReplicaSnapshot | None:
        """The one with the least to do, if it has not too much already; None: a copy would be in somebody's way."""
        admission, now, pool, adapter = self._admission, self._clock.now(), target.pool, target.adapter
        if len(self._open) >= self._most_open or admission.num_waiting(pool):
            return None
        free = [
            seen
            for seen in admission.replicas(pool)
            if seen.state_at(now) is ReplicaState.READY
            and (not adapter or adapter in seen.adapters)
            and not (seen.is_tripped or seen.load.num_queued or seen.role == "prefill" or seen.needs_peer)
            and 2 * seen.sequences < seen.max_sequences
            and 2 * seen.kv_used_tokens < seen.limits.kv_capacity_tokens
        ]
        copies = [copy.replica.id for copy in self._open]
        if not free:
            return None
        return min(free, key=lambda seen: (seen.queue_s, copies.count(seen.id)))


class Copy:
    """One copy, from its sending to its end."""

    __slots__ = (
        "_is_late",
        "_is_stream",
        "_load",
        "_owner",
        "_record",
        "_request",
        "_sink",
        "_told",
        "replica",
        "target",
    )

    def __init__(
        self,
        owner: Shadows,
        target: Target,
        routed: RoutedRequest,
        tenant: Tenant,
        replica: Replica,
        load: LoadMeter,
        body: bytes,
        max_kept: int,
        told: Told | None,
    ) -> None:
        """`told`: how it ended, after the metrics were."""
        self.target = target
        self.replica = replica
        self._owner = owner
        self._load = load
        self._told = told
        self._is_late = False
        self._is_stream = bool(routed.view.stream)
        self._record: StreamRecord | None = None
        path, relayed = routed.surface.path, b""
        if replica.relays and self._is_stream:
            relayed, self._record = STREAM_HEADER, StreamRecord()  # counts the tokens of a stream without usage
        headers, way = replica.headers_for(tenant, relayed=relayed), replica.way(tenant, path, body, target.adapter)
        tap = self._record.append if self._record is not None else None
        self._sink = Collected(max_kept)
        self._request = DirectRequest(self._sink, self._ended, tap)
        self._request.send(replica.id, way, path, headers, body)

    def cut_off(self) -> None:
        self._request.cancel()

    def give_up(self) -> None:
        """It has taken so long that it counts as failed."""
        self._is_late = True
        self._request.cancel()

    def _ended(self, ending: Ending, outcome: Outcome | None) -> None:
        end = self._end(ending, outcome)
        self._owner.ended(self, end)
        if self._told is not None:
            self._told(end)

    def _end(self, ending: Ending, outcome: Outcome | None) -> CopyEnd:
        in_flight = self._load.mean(is_counted=False)
        if ending is Ending.CLIENT_GONE:
            return CopyEnd("failed" if self._is_late else "cut_off", self.replica.id, in_flight)
        assert outcome is not None
        usage = find_usage(outcome.tail) if ending is Ending.OK else None
        if usage is None and self._record is not None and (prompt := self._record.prompt_tokens) is not None:
            usage = TokenUsage(prompt, *self._record.counts)
        sink, cost = self._sink, self._cost()
        return CopyEnd(
            "ok" if ending is Ending.OK else "failed",
            self.replica.id,
            in_flight,
            outcome.status,
            usage,
            outcome.first_byte_s if self._is_stream else None,
            outcome.total_s,
            cost.device_s if cost is not None else None,
            sink.body,
            len(sink.body) == sink.num_bytes,
        )

    def _cost(self) -> Cost | None:
        if self._record is not None:
            return self._record.cost
        head = self._request.head
        return read_cost(head.headers.get(_COST_HEADER, b"")) if head is not None else None
