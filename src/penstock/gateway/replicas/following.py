"""The connections that keep a gateway informed of each replica: reports and probes, KV events, LoRA adapters.

They begin when a replica is added. When one is removed, its KV blocks are forgotten and its adapters left alone at
once; its reports are read until its last request has ended, so that a replica that hangs meanwhile is noticed.
"""

from __future__ import annotations

import logging

from penstock.core.replica import ReplicaState
from penstock.dialects.kv_blocks import Changes
from penstock.gateway.replicas.kv_follower import KvFollower
from penstock.gateway.replicas.lora import AdapterKeeper, AdapterNotes
from penstock.gateway.replicas.replica import Follower, Replica
from penstock.gateway.replicas.replica_set import ReplicaSet, Subscriber
from penstock.gateway.replicas.zmq_events import EventSource, IndexTeller, KvEventReader
from penstock.observe.redaction import redact
from penstock.router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class Following(Subscriber):
    def __init__(self, replicas: ReplicaSet, index: PrefixIndex, notes: AdapterNotes) -> None:
        """`index` is told what the caches of those replicas hold that say so, `notes` what adapters they were given."""
        self._replicas = replicas
        self._index = index
        self._teller = IndexTeller(index)
        self._notes = notes
        self._states: dict[str, ReplicaState] = {}
        self._followers: dict[Replica, Follower] = {}  # of those that were removed and have not ended yet, too
        self._keepers: dict[str, AdapterKeeper] = {}
        self._kv_followers: dict[str, KvFollower] = {}
        self._kv_reader: KvEventReader | None = None

    def replica_added(self, replica: Replica) -> None:
        changed = self._replicas.changed
        self._keepers[replica.id] = AdapterKeeper(replica, changed, self._notes)
        self._followers[replica] = Follower(replica, changed)
        if replica.kv_events is not None:
            if self._kv_reader is None:
                self._kv_reader = KvEventReader(self._kv_told, namespace_of=replica.salts.namespace_of)
            for source in replica.kv_events.sources(replica.id, replica.url):
                self._kv_reader.add(source)

    def replica_changed(self, replica: Replica) -> None:
        if replica.relays and replica.id not in self._kv_followers:  # a penstock replica
            self._kv_followers[replica.id] = KvFollower(
                replica.id,
                replica.upstream,
                replica.headers,
                self._index,
                silent_after_s=replica.health.settings.stale_after_s,
            )
        self._log_state(replica)
        self._keepers[replica.id].look()

    def replica_removed(self, replica: Replica) -> None:
        self._keepers.pop(replica.id).close()
        if (kv_follower := self._kv_followers.pop(replica.id, None)) is not None:
            kv_follower.close()
        if replica.kv_events is not None and self._kv_reader is not None:
            for source in replica.kv_events.sources(replica.id, replica.url):
                self._kv_reader.remove(source)
        self._teller.forget(replica.id)
        self._states.pop(replica.id, None)
        log.info("%s of %s is no longer a replica", redact(replica.id), replica.model)
        replica.leave(self._close_follower)

    def _kv_told(self, source: EventSource, changes: Changes, is_approximate: bool) -> None:
        if source.replica_id in self._replicas:  # the reader's thread may not know yet that it was removed
            self._teller.told(source, changes, is_approximate)

    def _close_follower(self, replica: Replica) -> None:
        self._followers.pop(replica).close()
        replica.upstream.close()

    def _log_state(self, replica: Replica) -> None:
        """A replica that comes, goes, or is told to go; not what passes in a moment."""
        state = replica.snapshot.state
        if state is ReplicaState.DEGRADED:
            state = ReplicaState.READY
        if state is not self._states.get(replica.id, ReplicaState.OUT):
            level = logging.WARNING if state is ReplicaState.OUT and not replica.is_resting else logging.INFO
            log.log(level, "%s (%s) of %s is %s", redact(replica.id), replica.kind, replica.model, state)
        self._states[replica.id] = state

    def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.close()
        for kv_follower in self._kv_followers.values():
            kv_follower.close()
        if self._kv_reader is not None:
            self._kv_reader.close()
        for replica in list(self._followers):
            self._close_follower(replica)
