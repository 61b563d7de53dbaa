"""The loads of the replicas now: the last snapshot of each, and every event of ours that it cannot have counted.

Without the events a burst between two snapshots would all go to the replica that looked idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.core.replica import ReplicaSnapshot


class Change(msgspec.Struct, frozen=True, gc=False):
    at: float
    sequences: int
    prefill_tokens: int
    kv_tokens: int


class _Load:
    """The snapshot is made anew when somebody looks: three events of a request are one."""

    __slots__ = ("base", "changes", "known", "kv_tokens", "prefill_tokens", "sequences")

    def __init__(self, base: ReplicaSnapshot) -> None:
        self.base = base  # what it said itself
        self.changes: deque[Change] = deque()  # of one that reports: the others' next snapshot counts nothing
        self.sequences = self.prefill_tokens = self.kv_tokens = 0  # that the snapshot does not count
        self.known: ReplicaSnapshot | None = base  # None: something has happened since

    def current(self) -> ReplicaSnapshot:
        self.known = known = self.base.with_sent(self.sequences, self.prefill_tokens, self.kv_tokens)
        return known

    def rebase(self, base: ReplicaSnapshot) -> None:
        self.base = base
        self.known = None
        while self.changes and self.changes[0].at <= base.taken_at:
            counted = self.changes.popleft()
            self.sequences -= counted.sequences
            self.prefill_tokens -= counted.prefill_tokens
            self.kv_tokens -= counted.kv_tokens


class ReplicaLoads:
    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._by_model: dict[str, list[_Load]] = {}

    def of_model(self, model: str) -> Sequence[ReplicaSnapshot]:
        return [load.known or load.current() for load in self._by_model.get(model, ())]

    def base(self, replica_id: str) -> ReplicaSnapshot | None:
        """Returns what the replica last said, without what happened since."""
        load = self._loads.get(replica_id)
        return load.base if load is not None else None

    def update(self, snapshot: ReplicaSnapshot) -> None:
        load = self._loads.get(snapshot.id)
        if load is None:
            self._loads[snapshot.id] = load = _Load(snapshot)
            self._index()
            return
        has_moved = load.base.models != snapshot.models
        load.rebase(snapshot)
        if has_moved:
            self._index()

    def remove(self, replica_id: str) -> None:
        if self._loads.pop(replica_id, None) is not None:
            self._index()

    def change(self, replica_id: str, at: float, sequences: int, prefill_tokens: int, kv_tokens: int) -> None:
        load = self._loads.get(replica_id)
        if load is None:
            return
        if load.base.reports:
            load.changes.append(Change(at, sequences, prefill_tokens, kv_tokens))
        load.sequences += sequences
        load.prefill_tokens += prefill_tokens
        load.kv_tokens += kv_tokens
        load.known = None

    def _index(self) -> None:
        self._by_model = {}
        for load in self._loads.values():
            for model in load.base.models:
                self._by_model.setdefault(model, []).append(load)
