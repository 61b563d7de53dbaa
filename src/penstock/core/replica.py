"""Snapshot of what the edge last knew of a replica, as numbers; and what this gateway has sent it since.

A snapshot never changes: news makes a new one, so a stored choice still shows what was known when it was made. An old
one is not idle: `state_at` calls a replica that nobody has heard of for a while degraded, then out.
"""

from __future__ import annotations

import enum
from math import inf

import msgspec
from msgspec.structs import force_setattr, replace

from penstock.core.measurements import EngineLoad, ServingLimits
from penstock.core.settings import Role

STALE_AFTER_S = 1.0  # four polls missed, at four polls a second
GONE_AFTER_S = 30.0
_KV_LEAST_LEFT = 0.01  # a cache that is fuller counts as this full
HOST_SHARE = 0.2  # of a replica that does not say: most GPUs fetch five tokens and more while they compute one
KV_PULL_TOKENS_PER_S = 10_000.0  # of a replica that does not say: 128 KiB a token, as of 8B models, at 10 Gbit/s
UNBOUNDED = 1 << 40  # tokens; the size of what does not say its size, such as a provider
UNKNOWN_LIMITS = ServingLimits(
    max_num_seqs=256, chunk_tokens=2048, max_model_len=UNBOUNDED, kv_capacity_tokens=UNBOUNDED
)
UNBOUNDED_LIMITS = replace(UNKNOWN_LIMITS, max_num_seqs=UNBOUNDED, chunk_tokens=UNBOUNDED)


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
    stale_after_s: float = STALE_AFTER_S

    # what it says of itself, as it is in its report
    limits: ServingLimits = UNKNOWN_LIMITS
    load: EngineLoad = EngineLoad()
    adapters: frozenset[str] = frozenset()  # LoRA adapters that can be asked of it, by name
    warm_adapters: frozenset[str] = frozenset()  # of those, the ones on its device
    role: Role = "both"
    kv_address: str = ""  # host:port of its KV transfer; empty: it has none, or none that can be used
    kv_layout: str = ""  # KV blocks go between replicas whose layout is the same
    pulls_prefixes: bool = True  # False: KV comes to it only of prompts that another computes for it, as in vLLM
    needs_peer: bool = False  # it serves no request alone: it computes prompts for others, or waits for theirs

    # what this gateway takes its speed to be: what it measured, or else its siblings did, or its answers show
    prefill_tokens_per_s: float = 2000.0
    decode_tokens_per_s: float = 2000.0  # of the whole batch
    mean_output_tokens: float = 256.0
    host_share: float = HOST_SHARE  # what a token from its host memory costs, of one that it computes
    kv_pull_tokens_per_s: float = KV_PULL_TOKENS_PER_S  # that come to it from another replica

    # what this gateway thinks of it
    state: ReplicaState = ReplicaState.READY
    is_tripped: bool = False  # its circuit breaker lets nothing through now
    share: float = 1.0  # it counts as this much of a replica: it starts slowly, or is slower than its siblings

    # what this gateway sent since `taken_at`, less what it saw end
    sent_sequences: int = 0
    sent_prefill_tokens: int = 0
    sent_kv_tokens: int = 0

    # what follows from the numbers; nobody gives these. Stored: every pick reads them of every replica
    sequences: int = 0
    max_sequences: int = 1
    prefill_queued: int = 0
    kv_used_tokens: float = 0.0
    kv_pressure: float = 0.0  # 0 empty, 1 half full, without bound as it fills: as the wait of a queue near saturation
    queue_s: float = 0.0
    step_s: float = 0.0  # of decoding, for a token of each running sequence
    fresh_until: float = 0.0  # after it the numbers are stale

    def __post_init__(self) -> None:
        load, limits, running = self.load, self.limits, self.load.num_running
        taken = running + load.num_waiting
        sequences = (taken if taken > load.num_open else load.num_open) + self.sent_sequences  # as `num_queued` has it
        queued = load.queued_tokens + self.sent_prefill_tokens
        # Growth is included: prompts that wait take their blocks later, and a running sequence is half way through its
        # output on average.
        growth = load.queued_tokens + running * self.mean_output_tokens / 2
        kv = load.kv_active_tokens + growth + self.sent_kv_tokens
        queued = queued if queued > 0 else 0
        kv = kv if kv > 0.0 else 0.0
        left = 1.0 - kv / limits.kv_capacity_tokens
        step_s = running / self.decode_tokens_per_s
        max_sequences = limits.max_sequences or 1
        force_setattr(self, "max_sequences", max_sequences)
        force_setattr(self, "sequences", sequences if sequences > 0 else 0)
        force_setattr(self, "prefill_queued", queued)
        force_setattr(self, "kv_used_tokens", kv)
        force_setattr(self, "kv_pressure", 1.0 / left - 1.0 if left > _KV_LEAST_LEFT else 1.0 / _KV_LEAST_LEFT - 1.0)
        force_setattr(self, "step_s", step_s)
        queue_s = queued / self.prefill_tokens_per_s + step_s
        excess = sequences + 1 - max_sequences
        if excess > 0:  # beyond its last place a replica frees one for every mean output that it decodes
            queue_s += excess * self.mean_output_tokens / self.decode_tokens_per_s
        force_setattr(self, "queue_s", queue_s)
        force_setattr(self, "fresh_until", self.taken_at + self.stale_after_s if self.reports else inf)

    def state_at(self, now: float) -> ReplicaState:
        if not self.reports:
            return self.state
        age_s = now - self.taken_at
        if age_s <= self.stale_after_s or self.state in (ReplicaState.OUT, ReplicaState.DRAINING):
            return self.state
        return ReplicaState.DEGRADED if age_s <= GONE_AFTER_S else ReplicaState.OUT

    def with_sent(self, sequences: int, prefill_tokens: int, kv_tokens: int) -> ReplicaSnapshot:
        return replace(self, sent_sequences=sequences, sent_prefill_tokens=prefill_tokens, sent_kv_tokens=kv_tokens)
