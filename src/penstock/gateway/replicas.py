"""The replicas a gateway sends work to: how to reach each, and what it last said of itself.

A penstock replica pushes a report whenever it changes; one that falls silent is stale, then out (`core.replica`). A
server that has no such reports is a provider: it counts as ready and as large as it likes, and its failures speak.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.api import relay
from penstock.api.replica_report import ReplicaReport
from penstock.core.replica import UNBOUNDED, ReplicaSnapshot, ReplicaState
from penstock.gateway.health.breaker import BreakerSettings, CircuitBreaker
from penstock.gateway.health.slow_start import SlowStart, SlowStartSettings
from penstock.gateway.http.call import Call, Failure
from penstock.gateway.http.message import ResponseHead, render
from penstock.gateway.http.upstream import Upstream

_RETRY_S = 0.25
_SILENT_S = 3.0  # without a report, though they come every second: it hangs
_DECODE_SPEED = 2000.0  # tokens per second, of a replica that has measured nothing yet

_reports = msgspec.json.Decoder(ReplicaReport)


class Rider(Protocol):
    """A request that is at a replica."""

    def replica_lost(self) -> None: ...


class Replica:
    def __init__(self, url: str, *, model: str, upstream: Upstream, key: str | None, secret: str | None) -> None:
        self.id = url
        self.model = model
        self.upstream = upstream
        self.riders: set[Rider] = set()
        self.snapshot = ReplicaSnapshot(id=url, url=url, models=(model,), state=ReplicaState.OUT)
        self.relays = False  # streams can be carried on: it is a penstock replica
        self.breaker = CircuitBreaker(BreakerSettings())
        self._slow_start = SlowStart(SlowStartSettings())
        self._was_ready = False
        headers = [(b"content-type", b"application/json")]
        if key is not None:
            headers.append((b"authorization", b"Bearer " + key.encode()))
        if secret is not None:
            headers.append((relay.SECRET_HEADER.encode(), secret.encode()))
        self.headers = render(headers)

    def heard(self, snapshot: ReplicaSnapshot, now: float) -> None:
        """One that comes back starts slowly: its cache is cold, and what took it out may do so again."""
        if snapshot.state is ReplicaState.READY and self.snapshot.state is ReplicaState.OUT and self._was_ready:
            self._slow_start.begin(now)
        self._was_ready |= snapshot.state is ReplicaState.READY
        self.snapshot = snapshot

    def seen(self, now: float) -> ReplicaSnapshot:
        """What it said, and what this gateway thinks of it."""
        return msgspec.structs.replace(
            self.snapshot, is_tripped=self.breaker.is_tripped(now), share=self._slow_start.share(now)
        )


Changed = Callable[[Replica], None]


class Follower:
    """Reads one replica's reports for as long as the gateway runs."""

    def __init__(self, replica: Replica, changed: Changed) -> None:
        self._replica = replica
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rest = b""
        self._has_reports = False
        self._is_penstock = False
        self._heard_at = self._loop.time()
        self._connect()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._call is not None:
            self._call.cancel()

    # -- what the replica says

    def head(self, head: ResponseHead) -> None:
        content_type = head.headers.get(b"content-type", b"")
        self._has_reports = head.status == 200 and content_type.startswith(b"text/event-stream")
        self._is_penstock = self._has_reports or head.status in (403, 503)  # a secret is missing; it is just starting
        self._rest = b""

    def data(self, data: bytes, is_last: bool) -> None:
        self._heard_at = self._loop.time()
        if self._has_reports:
            *events, self._rest = (self._rest + data).split(b"\n\n")
            if events:
                self._take(events[-1])
        if is_last:
            self._lost() if self._is_penstock else self._is_provider()

    def failed(self, failure: Failure) -> None:
        self._lost()

    # -- inside

    def _connect(self) -> None:
        self._heard_at = self._loop.time()
        self._call = self._replica.upstream.send(b"GET", b"/v1/penstock/snapshots", self._replica.headers, b"", self)
        self._watch()

    def _watch(self) -> None:
        if self._loop.time() - self._heard_at > _SILENT_S:
            if self._call is not None:
                self._call.cancel()
            self._lost()
            return
        self._timer = self._loop.call_later(_SILENT_S / 4, self._watch)

    def _take(self, event: bytes) -> None:
        try:
            report = _reports.decode(event.removeprefix(b"data: "))
        except msgspec.DecodeError:
            return
        self._replica.relays = True
        self._tell(_snapshot(self._replica, report, self._heard_at))

    def _is_provider(self) -> None:
        """It is asked no more; how much it can take, and whether it works, its answers tell."""
        if self._timer is not None:
            self._timer.cancel()
        replica = self._replica
        self._tell(
            ReplicaSnapshot(
                id=replica.id, url=replica.id, models=(replica.model,), state=ReplicaState.READY, reports=False,
                max_sequences=UNBOUNDED, step_tokens=UNBOUNDED,
            )
        )  # fmt: skip

    def _lost(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._call = None
        self._tell(msgspec.structs.replace(self._replica.snapshot, state=ReplicaState.OUT))
        for rider in list(self._replica.riders):
            rider.replica_lost()
        self._timer = self._loop.call_later(_RETRY_S, self._connect)

    def _tell(self, snapshot: ReplicaSnapshot) -> None:
        self._replica.heard(snapshot, self._loop.time())
        self._changed(self._replica)


def _snapshot(replica: Replica, report: ReplicaReport, heard_at: float) -> ReplicaSnapshot:
    state = ReplicaState.READY
    if report.is_draining:
        state = ReplicaState.DRAINING
    elif report.state != "ready":
        state = ReplicaState.OUT
    step_s = report.decode_step_s
    return ReplicaSnapshot(
        id=replica.id,
        url=replica.id,
        models=(replica.model,),
        taken_at=heard_at,
        max_sequences=min(report.max_num_seqs, report.max_open) or 1,
        max_context_tokens=report.max_model_len or 1,
        kv_capacity_tokens=report.kv_capacity_tokens or 1,
        step_tokens=report.chunk_tokens or 1,
        prefill_tokens_per_s=report.prefill_tokens_per_s or 2000.0,
        decode_tokens_per_s=max(report.num_running, 1) / step_s if step_s else _DECODE_SPEED,
        waiting=report.num_waiting,
        running=report.num_running,
        prefill_tokens=report.queued_tokens,
        kv_active_tokens=report.kv_active_tokens,
        steps=report.steps,
        state=state,
    )
