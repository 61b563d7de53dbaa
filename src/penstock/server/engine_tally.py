"""What the engine says of itself after every step, as metrics. A step costs three observations and a few additions:
all the rest is worked out when somebody looks."""

from __future__ import annotations

from penstock.engine.messages import EngineInfo, EngineStats
from penstock.observe import catalog, device_catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Registry

# By the names of the engine's own figures.
_LEVELS: dict[Metric, str] = {
    catalog.SEQUENCES_RUNNING: "num_running",
    catalog.SEQUENCES_WAITING: "num_waiting",
    catalog.QUEUED_TOKENS: "queued_tokens",
    catalog.KV_USAGE: "kv_usage",
    catalog.KV_FRAGMENTATION: "kv_fragmentation",
    catalog.KV_CACHED_BLOCKS: "cached_blocks",
    catalog.STEP_BUDGET: "budget_tokens",
}
_TOTALS: dict[Metric, str] = {
    catalog.BUSY: "busy_s",
    catalog.PREEMPTIONS: "preemptions",
    catalog.RECOMPUTED_TOKENS: "recomputed_tokens",
    catalog.LOADED_TOKENS: "loaded_tokens",
    catalog.PREFIX_TOKENS: "prompt_tokens",
    catalog.PREFIX_HIT_TOKENS: "cached_tokens",
    catalog.GENERATED_TOKENS: "generated_tokens",
    catalog.DRAFT_TOKENS: "drafted_tokens",
    catalog.ACCEPTED_TOKENS: "accepted_tokens",
    catalog.FORCED_TOKENS: "forced_tokens",
    catalog.MASK_WAIT: "mask_wait_s",
    catalog.KV_EVICTIONS: "evictions",
}
_KEEP = 0.98  # of what was known of bandwidth, at every step


class EngineTally:
    def __init__(self, tallies: Registry) -> None:
        self._tallies = tallies
        self._step_time = tallies.spread(catalog.STEP_TIME)
        self._batch_size = tallies.spread(catalog.BATCH_SIZE)
        self._step_tokens = tallies.spread(catalog.STEP_TOKENS)
        self._last = EngineStats()
        self._before = dict.fromkeys(_TOTALS, 0.0)  # of engines that are no more
        self._recent_s = self._recent_steps = self._recent_reads = 0.0  # of recent steps, the newest most

    def take(self, stats: EngineStats) -> None:
        last, self._last = self._last, stats
        if stats.steps < last.steps:  # another process, which counts from zero
            self._before = {metric: self._before[metric] + getattr(last, name) for metric, name in _TOTALS.items()}
            last = EngineStats()
        if stats.steps > last.steps:
            self._step_time.observe(stats.cost_s)
            self._batch_size.observe(stats.step_sequences)
            self._step_tokens.observe(stats.step_tokens)
            self._recent_s = _KEEP * self._recent_s + stats.cost_s
            self._recent_steps = _KEEP * self._recent_steps + 1
            self._recent_reads = _KEEP * self._recent_reads + stats.read_tokens - last.read_tokens

    def look(self, info: EngineInfo | None) -> None:
        """Takes down how things stand."""
        count, stats = self._tallies.count, self._last
        for metric, name in _LEVELS.items():
            count(metric).value = getattr(stats, name)
        for metric, name in _TOTALS.items():
            count(metric).value = self._before[metric] + getattr(stats, name)
        if info is not None:
            count(catalog.KV_CAPACITY, info.kv_dtype).value = info.num_blocks * info.block_size
            self._look_at_bandwidth(info)

    def _look_at_bandwidth(self, info: EngineInfo) -> None:
        peak = info.read_bytes_per_s
        if peak is None or self._recent_s <= 0:
            return
        read_bytes = self._recent_steps * info.weight_bytes + self._recent_reads * info.kv_token_bytes
        self._tallies.count(device_catalog.MBU, info.device_name).value = read_bytes / self._recent_s / peak
