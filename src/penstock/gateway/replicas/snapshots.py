"""Snapshots for admission: what a replica reported, its health as this gateway sees it, and its speed beside others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from msgspec.structs import replace

from penstock.admission.admission import Admission
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.gateway.records.token_usage import TokenUsage
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.health.speeds import Speeds
from penstock.http.forward import Outcome
from penstock.router.learning import ObservedSpeeds


class Snapshots(Subscriber):
    def __init__(self, admission: Admission, now: Callable[[], float]) -> None:
        self._admission = admission
        self._now = now
        self._speeds: defaultdict[str, Speeds] = defaultdict(Speeds)  # by pool
        self._observed = ObservedSpeeds()

    def replica_changed(self, replica: Replica) -> None:
        self._admission.replica_changed(self._snapshot(replica, self._now()))

    def _snapshot(self, replica: Replica, now: float) -> ReplicaSnapshot:
        snapshot, speeds = replica.seen(now), self._speeds[replica.model]
        if snapshot.state is ReplicaState.OUT:
            speeds.forget(replica.id)
            return snapshot
        if not replica.relays:
            if has := replica.loaded | replica.listed:
                snapshot = replace(snapshot, adapters=has, warm_adapters=has)
            return self._with_observed(replica, snapshot)
        speed = speeds.seen(replica.id, replica.prefill_speed, snapshot.prefill_tokens_per_s)
        return replace(snapshot, prefill_tokens_per_s=speed)

    def _with_observed(self, replica: Replica, snapshot: ReplicaSnapshot) -> ReplicaSnapshot:
        """A server that does not report its speed has shown it by its answers."""
        observed = self._observed.of(replica.id)
        if observed is None:
            return snapshot
        prefill, decode = snapshot.prefill_tokens_per_s, snapshot.decode_tokens_per_s
        if replica.prefill_speed is None:
            prefill = observed.prefill
        if not snapshot.reports:
            decode = observed.decode * max(1, len(replica.in_flight))
        return replace(snapshot, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)

    def answered(self, replica: Replica, usage: TokenUsage, outcome: Outcome) -> None:
        """A stream came to its end."""
        if not replica.relays and outcome.first_byte_s is not None:
            self._observed.learn(
                replica.id,
                usage.input_tokens - usage.cached_tokens,
                outcome.first_byte_s,
                usage.output_tokens,
                outcome.total_s - outcome.first_byte_s,
            )

    def replica_removed(self, replica: Replica) -> None:
        self._admission.replica_gone(replica.id)
        self._observed.forget(replica.id)
        if (speeds := self._speeds.get(replica.model)) is not None:
            speeds.forget(replica.id)
            if speeds.is_empty:
                del self._speeds[replica.model]
