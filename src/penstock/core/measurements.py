"""The measurement record: each number that a replica measures is declared here once.

    engine step ──▶ server ──▶ replica report ──▶ gateway snapshot
                      │                             │
                      └─ metrics, console           └─ router, admission, console

The groups are carried as they are. The engine fills `load`, `totals`, `cache`, `disk` and `speculation` after every
step, and `limits` once; the server adds what it sees itself. The groups are one flat object in a replica's report, so a
name occurs once in all of them. A new number goes last in its group and has a default: versions meet during an upgrade.
"""

from __future__ import annotations

from msgspec import Struct

from penstock.core.devices import DeviceReading
from penstock.core.ranks import RankFigures


class ServingLimits(Struct, frozen=True, gc=False, array_like=True):
    """Sizes that hold for as long as the engine runs; 0: it has not said."""

    max_open: int = 0  # choices that the server takes at once
    max_num_seqs: int = 0
    chunk_tokens: int = 0  # most tokens in a step: about how much waiting prefill keeps it busy
    max_model_len: int = 0
    block_size: int = 0  # tokens
    kv_capacity_tokens: int = 0

    @property
    def max_sequences(self) -> int:
        """Places for sequences: the server's limit counts as well as the engine's."""
        return min(self.max_num_seqs, self.max_open or self.max_num_seqs)

    @property
    def num_blocks(self) -> int:
        return self.kv_capacity_tokens // self.block_size if self.block_size else 0


class EngineLoad(Struct, frozen=True, gc=False, array_like=True):
    """Work at hand. Steps that stand still while sequences run mean that the engine hangs."""

    num_open: int = 0  # choices that the server has taken and not finished
    num_waiting: int = 0  # sequences
    num_running: int = 0
    queued_tokens: int = 0  # known and still to be computed before their sequences can generate
    kv_active_tokens: int = 0  # in blocks that sequences hold; what is merely cached counts as free
    steps: int = 0  # of the engine since its start
    kv_fragmentation: float = 0.0  # the part of the room in sequences' blocks that has no token in it
    budget_tokens: int = 0  # that the next step may carry
    expert_imbalance: float = 0.0  # tokens of the busiest rank by the mean, of late; 0: no experts are shared out

    @property
    def num_queued(self) -> int:
        """Sequences that do not run yet: the engine counts after a step, the server at once."""
        return max(self.num_waiting, self.num_open - self.num_running)


class EngineTotals(Struct, frozen=True, gc=False, array_like=True):
    """Counters since the engine's start."""

    busy_s: float = 0.0  # time in which the device has worked
    generated_tokens: int = 0
    received_tokens: int = 0  # of all prompts that have come to the engine
    preemptions: int = 0
    recomputed_tokens: int = 0  # by sequences that had been preempted
    read_tokens: int = 0  # of context, from the cache, by all steps together; what several share counts once a step
    forced_tokens: int = 0  # of those generated, by guides
    mask_wait_s: float = 0.0  # of steps, for guides


class PrefixCacheUse(Struct, frozen=True, gc=False, array_like=True):
    """Counters since the engine's start, but for `cached_blocks`."""

    prompt_tokens: int = 0  # looked up
    cached_tokens: int = 0  # of them, found
    loaded_tokens: int = 0  # of those, from host memory
    evictions: int = 0
    cached_blocks: int = 0  # that a lookup can find now, held or free


class DiskCacheUse(Struct, frozen=True, gc=False, array_like=True):
    """KV blocks on disk. Counters since the engine's start, but for `disk_blocks` and `disk_bytes`."""

    disk_blocks: int = 0  # that are there now
    disk_bytes: int = 0  # of their files
    disk_loaded_tokens: int = 0  # read into host memory
    disk_dropped_blocks: int = 0  # that were not written before host memory was needed, or could not be
    disk_late_blocks: int = 0  # not waited for any longer: computing them took less time
    disk_damaged_blocks: int = 0  # files that failed their check
    disk_errors: int = 0  # of the operating system


class SpeculationTotals(Struct, frozen=True, gc=False, array_like=True):
    """Counters since the engine's start."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


class KvTransferTotals(Struct, frozen=True, gc=False, array_like=True):
    """Counters since the engine's start, of KV blocks that come from other engines or go there."""

    pulled_tokens: int = 0
    pulls: int = 0
    failed_pulls: int = 0  # of them, those that ended before all had come: the rest was computed
    pull_s: float = 0.0  # all pulls together, waiting for what is computed elsewhere included
    lent_tokens: int = 0
    kv_sources: tuple[tuple[str, int], ...] = ()  # connections to engines to pull from, by mover


class EngineSpeeds(Struct, frozen=True, gc=False, array_like=True):
    """Speeds of recent steps; None: not measured yet."""

    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None  # a step in which every sequence made one token
    host_tokens_per_s: float | None = None  # whose keys and values come back from host memory
    kv_pull_tokens_per_s: float | None = None  # the same from other engines, of blocks that they had


class DeviceReadings(Struct, frozen=True, gc=False, array_like=True):
    devices: tuple[DeviceReading, ...] = ()  # as they were last read, once a second; none: nothing is known of them
    device_fault: str = ""  # why one of them gets no more work; the replica is draining then
    parallelism: str = ""  # of several ranks, in short: TP2 PP2; "": there is one
    ranks: tuple[RankFigures, ...] = ()  # of the model, as they last said; none: there is one, or nobody has said


class EngineMeasurements(Struct, frozen=True, gc=False, omit_defaults=True):
    load: EngineLoad = EngineLoad()
    totals: EngineTotals = EngineTotals()
    cache: PrefixCacheUse = PrefixCacheUse()
    speculation: SpeculationTotals = SpeculationTotals()
    limits: ServingLimits = ServingLimits()
    speeds: EngineSpeeds = EngineSpeeds()
    device: DeviceReadings = DeviceReadings()
    transfer: KvTransferTotals = KvTransferTotals()
    disk: DiskCacheUse = DiskCacheUse()

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache that sequences hold."""
        capacity = self.limits.kv_capacity_tokens
        return self.load.kv_active_tokens / capacity if capacity else 0.0
