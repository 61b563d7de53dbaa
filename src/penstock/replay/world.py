"""Replicas as a policy's choices make them, as far as choices alone tell it: a model, and a coarse one.

Two are fed, one with what was chosen and one with what another policy would have chosen. Only their difference is used,
on top of what the log says of the replicas: what the model gets wrong in both cancels. It knows no log and no policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.core.replica import UNBOUNDED, ReplicaSnapshot
from penstock.router.prefix_index import UNKNOWN_CAPACITY_BLOCKS, PrefixIndex
from penstock.router.request import EdgeRequest


class Load(NamedTuple):
    sequences: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0


class _Entry(NamedTuple):
    """An open request."""

    replica_id: str
    prompt_tokens: float  # that had to be computed
    kv_tokens: int


class _Replica:
    __slots__ = ("_at_s", "_queued", "kv_tokens", "prompts", "sequences")

    def __init__(self) -> None:
        self.sequences = self.kv_tokens = 0
        self.prompts = 0.0  # tokens to compute of all that are open
        self._queued = self._at_s = 0.0

    def queued(self, now: float, tokens_per_s: float) -> float:
        """Prompt tokens still to be computed: they run off at the replica's speed, and who has left wants none."""
        self._queued = min(max(0.0, self._queued - (now - self._at_s) * tokens_per_s), self.prompts)
        self._at_s = now
        return self._queued

    def enter(self, entry: _Entry, sign: int = 1) -> None:
        self.sequences += sign
        self.prompts += sign * entry.prompt_tokens
        self.kv_tokens += sign * entry.kv_tokens
        if sign > 0:
            self._queued += entry.prompt_tokens


class World:
    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._open: dict[str, _Entry] = {}
        self._index = PrefixIndex()  # nobody publishes in it: what was sent is held, as much as fits

    def load(self, replica: ReplicaSnapshot, now: float) -> Load:
        found = self._replicas.get(replica.id)
        if found is None:
            return Load()
        return Load(found.sequences, round(found.queued(now, replica.prefill_tokens_per_s)), found.kv_tokens)

    def held(self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> Mapping[str, int]:
        return self._index.held(request.hashes, replicas)

    def seen(self, replica: ReplicaSnapshot, hashes: Sequence[int], now: float, block_tokens: int) -> None:
        """It holds these, whoever sent them there."""
        capacity = replica.limits.kv_capacity_tokens
        most = capacity // block_tokens if capacity < UNBOUNDED else UNKNOWN_CAPACITY_BLOCKS
        self._index.predicted(replica.id, hashes, now, most)

    def sent(self, request: EdgeRequest, replica: ReplicaSnapshot, tokens: float, now: float) -> None:
        """Moves a request there from where it was, if it was sent already. `tokens`: of its prompt, to compute."""
        self.ended(request.id)
        found = self._replicas.setdefault(replica.id, _Replica())
        found.queued(now, replica.prefill_tokens_per_s)
        entry = _Entry(replica.id, tokens, request.kv_tokens)
        found.enter(entry)
        self._open[request.id] = entry
        if request.hashes:
            self.seen(replica, request.hashes, now, request.block_tokens)

    def ended(self, request_id: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._replicas[entry.replica_id].enter(entry, -1)
