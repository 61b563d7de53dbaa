"""What the edge last knew of a replica, as numbers; and what this gateway has sent it since.

A snapshot never changes: who learns more makes a new one, so a stored choice still shows what was known when it was
made. What is old is not idle: `state_at` calls a replica that nobody has heard of for a while degraded, then out.
"""

from __future__ import annotations

import enum

import msgspec

STALE_AFTER_S = 1.0  # four polls missed, at four polls a second
GONE_AFTER_S = 30.0
UNBOUNDED = 1 << 40  # tokens; the size of what does not say its size, such as a provider


class ReplicaState(enum.StrEnum):
    READY = "ready"
    DEGRADED = "degraded"  # used only when no ready replica has room
    DRAINING = "draining"  # finishes what it has; gets nothing new
    OUT = "out"


class ReplicaSnapshot(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """`taken_at` is no later than the oldest event that the numbers do not count yet (when the poll was sent)."""

    id: str
    url: str = ""
    models: tuple[str, ...] = ()
    taken_at: float = 0.0
    reports: bool = True  # False: it says nothing of itself, as providers do, so that its silence means nothing

    # what it can do
    max_sequences: int = 256
    max_context_tokens: int = UNBOUNDED
    kv_capacity_tokens: int = UNBOUNDED
    step_tokens: int = 2048  # the most a step carries: about how much waiting prefill keeps it busy
    prefill_tokens_per_s: float = 2000.0
    decode_tokens_per_s: float = 2000.0  # of the whole batch
    mean_output_tokens: float = 256.0

    # what it is doing
    waiting: int = 0
    running: int = 0
    prefill_tokens: int = 0  # known but not computed, of waiting and running sequences
    kv_active_tokens: int = 0  # held by sequences; what is only cached counts as free
    steps: int = 0

    # what this gateway thinks of it
    state: ReplicaState = ReplicaState.READY
    is_tripped: bool = False  # its circuit breaker lets nothing through now
    share: float = 1.0  # slow start: it counts as this much of a replica

    # what this gateway sent since `taken_at`, less what it saw end
    sent_sequences: int = 0
    sent_prefill_tokens: int = 0
    sent_kv_tokens: int = 0

    @property
    def sequences(self) -> int:
        count = self.running + self.waiting + self.sent_sequences
        return count if count > 0 else 0

    @property
    def prefill_queued(self) -> int:
        tokens = self.prefill_tokens + self.sent_prefill_tokens
        return tokens if tokens > 0 else 0

    @property
    def kv_used_tokens(self) -> float:
        """With growth: a running sequence is, on average, half way through its output."""
        growth = self.running * self.mean_output_tokens / 2
        tokens = self.kv_active_tokens + growth + self.sent_kv_tokens
        return tokens if tokens > 0.0 else 0.0

    @property
    def kv_free_tokens(self) -> float:
        return max(0.0, self.kv_capacity_tokens - self.kv_used_tokens)

    def state_at(self, now: float, stale_after_s: float = STALE_AFTER_S) -> ReplicaState:
        if not self.reports:
            return self.state
        age_s = now - self.taken_at
        if age_s <= stale_after_s or self.state in (ReplicaState.OUT, ReplicaState.DRAINING):
            return self.state
        return ReplicaState.DEGRADED if age_s <= GONE_AFTER_S else ReplicaState.OUT

    def with_sent(self, sequences: int, prefill_tokens: int, kv_tokens: int) -> ReplicaSnapshot:
        return msgspec.structs.replace(
            self, sent_sequences=sequences, sent_prefill_tokens=prefill_tokens, sent_kv_tokens=kv_tokens
        )
