"""What the replicas are doing now: the last snapshot of each, and every event of ours that it cannot have counted.

Without the events a burst between two snapshots would all go to the replica that looked idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.replica import ReplicaSnapshot


class Change(NamedTuple):
    at: float
    sequences: int
    prefill_tokens: int
    kv_tokens: int


class _Load:
    def __init__(self, base: ReplicaSnapshot) -> None:
        self.current = base
        self._changes: deque[Change] = deque()

    def add(self, change: Change) -> None:
        self._changes.append(change)
        now = self.current
        self.current = now.with_sent(
            now.sent_sequences + change.sequences,
            now.sent_prefill_tokens + change.prefill_tokens,
            now.sent_kv_tokens + change.kv_tokens,
        )

    def rebase(self, base: ReplicaSnapshot) -> None:
        while self._changes and self._changes[0].at <= base.taken_at:
            self._changes.popleft()
        left = self._changes
        self.current = base.with_sent(
            sum(change.sequences for change in left),
            sum(change.prefill_tokens for change in left),
            sum(change.kv_tokens for change in left),
        )


class ReplicaLoads:
    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}
        self._by_model: dict[str, list[_Load]] = {}

    def of_model(self, model: str) -> Sequence[ReplicaSnapshot]:
        return [load.current for load in self._by_model.get(model, ())]

    def get(self, replica_id: str) -> ReplicaSnapshot | None:
        load = self._loads.get(replica_id)
        return load.current if load is not None else None

    def update(self, snapshot: ReplicaSnapshot) -> None:
        load = self._loads.get(snapshot.id)
        if load is None:
            self._loads[snapshot.id] = load = _Load(snapshot)
            self._index()
            return
        has_moved = load.current.models != snapshot.models
        load.rebase(snapshot)
        if has_moved:
            self._index()

    def remove(self, replica_id: str) -> None:
        if self._loads.pop(replica_id, None) is not None:
            self._index()

    def change(self, replica_id: str, at: float, *, sequences: int = 0, prefill_tokens: int = 0, kv: int = 0) -> None:
        load = self._loads.get(replica_id)
        if load is not None:
            load.add(Change(at, sequences, prefill_tokens, kv))

    def _index(self) -> None:
        self._by_model = {}
        for load in self._loads.values():
            for model in load.current.models:
                self._by_model.setdefault(model, []).append(load)
