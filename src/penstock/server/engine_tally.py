"""Metrics of what the engine says of itself after every step. A step costs three observations and a few additions: all
the rest is worked out when somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import astuple, replace

from penstock.core.expert_load import ExpertLoad
from penstock.core.measurements import EngineMeasurements
from penstock.core.ranks import RankFigures, RankReading
from penstock.engine.messages import EngineInfo, StepReport
from penstock.observe import catalog, device_catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Registry

# Places of the numbers in the measurement record, by metric.
_LEVELS: dict[Metric, attrgetter[float]] = {
    catalog.SEQUENCES_RUNNING: attrgetter("load.num_running"),
    catalog.SEQUENCES_WAITING: attrgetter("load.num_waiting"),
    catalog.QUEUED_TOKENS: attrgetter("load.queued_tokens"),
    catalog.KV_USAGE: attrgetter("kv_usage"),
    catalog.KV_FRAGMENTATION: attrgetter("load.kv_fragmentation"),
    catalog.KV_CACHED_BLOCKS: attrgetter("cache.cached_blocks"),
    catalog.STEP_BUDGET: attrgetter("load.budget_tokens"),
    catalog.DISK_KV_BLOCKS: attrgetter("disk.disk_blocks"),
    catalog.DISK_KV_BYTES: attrgetter("disk.disk_bytes"),
}
_TOTALS: dict[Metric, attrgetter[float]] = {
    catalog.BUSY: attrgetter("totals.busy_s"),
    catalog.PREEMPTIONS: attrgetter("totals.preemptions"),
    catalog.RECOMPUTED_TOKENS: attrgetter("totals.recomputed_tokens"),
    catalog.LOADED_TOKENS: attrgetter("cache.loaded_tokens"),
    catalog.DISK_KV_TOKENS: attrgetter("disk.disk_loaded_tokens"),
    catalog.DISK_KV_DROPPED: attrgetter("disk.disk_dropped_blocks"),
    catalog.DISK_KV_LATE: attrgetter("disk.disk_late_blocks"),
    catalog.DISK_KV_DAMAGED: attrgetter("disk.disk_damaged_blocks"),
    catalog.DISK_KV_ERRORS: attrgetter("disk.disk_errors"),
    catalog.PULLED_TOKENS: attrgetter("transfer.pulled_tokens"),
    catalog.KV_PULLS: attrgetter("transfer.pulls"),
    catalog.KV_FAILED_PULLS: attrgetter("transfer.failed_pulls"),
    catalog.KV_PULL_TIME: attrgetter("transfer.pull_s"),
    catalog.LENT_TOKENS: attrgetter("transfer.lent_tokens"),
    catalog.PREFIX_TOKENS: attrgetter("cache.prompt_tokens"),
    catalog.PREFIX_HIT_TOKENS: attrgetter("cache.cached_tokens"),
    catalog.GENERATED_TOKENS: attrgetter("totals.generated_tokens"),
    catalog.DRAFT_TOKENS: attrgetter("speculation.drafted_tokens"),
    catalog.ACCEPTED_TOKENS: attrgetter("speculation.accepted_tokens"),
    catalog.FORCED_TOKENS: attrgetter("totals.forced_tokens"),
    catalog.MASK_WAIT: attrgetter("totals.mask_wait_s"),
    catalog.KV_EVICTIONS: attrgetter("cache.evictions"),
}
_KEEP = 0.98  # of what was known of bandwidth, at every step


class RankNews(NamedTuple):
    """Ranks of the model: as they last said, and what follows from it. None: there is one."""

    readings: Sequence[RankReading]
    figures: Sequence[RankFigures]


class EngineTally:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._step_time = registry.spread(catalog.STEP_TIME)
        self._batch_size = registry.spread(catalog.BATCH_SIZE)
        self._step_tokens = registry.spread(catalog.STEP_TOKENS)
        self._last = EngineMeasurements()
        self._before = dict.fromkeys(_TOTALS, 0.0)  # of engines that are no more
        self._recent_s = self._recent_steps = self._recent_reads = 0.0  # of recent steps, the newest most

    def take(self, report: StepReport) -> None:
        now, last, step = report.measured, self._last, report.step
        self._last = now
        if now.load.steps < last.load.steps:  # another process, which counts from zero
            self._before = {metric: self._before[metric] + read(last) for metric, read in _TOTALS.items()}
            last = EngineMeasurements()
        if now.load.steps > last.load.steps:
            self._step_time.observe(step.cost_s)
            self._batch_size.observe(step.num_sequences)
            self._step_tokens.observe(step.num_tokens)
            self._recent_s = _KEEP * self._recent_s + step.cost_s
            self._recent_steps = _KEEP * self._recent_steps + 1
            self._recent_reads = _KEEP * self._recent_reads + now.totals.read_tokens - last.totals.read_tokens

    def look(self, info: EngineInfo | None) -> None:
        """Takes down how things stand."""
        count, measured = self._registry.count, self._last
        if info is not None:
            measured = replace(measured, limits=info.limits)
            count(catalog.KV_CAPACITY, info.kv_dtype).value = info.limits.kv_capacity_tokens
            self._look_at_bandwidth(info)
        for metric, read in _LEVELS.items():
            count(metric).value = read(measured)
        for metric, read in _TOTALS.items():
            count(metric).value = self._before[metric] + read(measured)
        sources = {"tcp": 0} | dict(measured.transfer.kv_sources)  # a number where there are none, too
        self._registry.replace(catalog.KV_SOURCES, {(mover,): n for mover, n in sources.items()})

    def look_at_ranks(self, ranks: RankNews) -> None:
        """Takes down how each rank of the model stands; a rank that is no more is forgotten."""
        found: dict[Metric, dict[tuple[str, ...], float]] = {metric: {} for metric in device_catalog.OF_RANKS}
        for rank, node, usage in map(astuple, ranks.readings):
            labels = str(rank), node, usage.device
            found[device_catalog.RANK_MEMORY][labels] = usage.memory_bytes
            found[device_catalog.RANK_BUSY][labels] = usage.busy_s
            if usage.communication_s is not None:
                method = "estimated" if usage.is_estimated else "measured"
                found[device_catalog.RANK_COMMUNICATION][*labels, method] = usage.communication_s
        for each in ranks.figures:
            if each.mbu is not None:
                found[device_catalog.RANK_MBU][str(each.rank), each.node, each.device] = each.mbu
        for metric, values in found.items():
            self._registry.replace(metric, values)

    def look_at_experts(self, load: ExpertLoad | None, recent: ExpertLoad | None) -> None:
        """Takes down what a mixture's experts were given: since the engine's start, and of late."""
        tokens = load.tokens_by_rank if load is not None else {}
        ratios: dict[tuple[str, ...], float] = {}
        if recent is not None:
            ratios[("experts",)] = recent.expert_imbalance
            if tokens:
                ratios[("ranks",)] = recent.rank_imbalance
        self._registry.replace(device_catalog.RANK_EXPERT_TOKENS, {(str(rank),): n for rank, n in tokens.items()})
        self._registry.replace(device_catalog.EXPERT_IMBALANCE, ratios)

    def _look_at_bandwidth(self, info: EngineInfo) -> None:
        peak = info.read_bytes_per_s
        if peak is None or self._recent_s <= 0:
            return
        read_bytes = self._recent_steps * info.weight_bytes + self._recent_reads * info.kv_token_bytes
        self._registry.count(device_catalog.MBU, info.device_name).value = read_bytes / self._recent_s / peak
