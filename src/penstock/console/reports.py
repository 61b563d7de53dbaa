"""Rates of a replica: of the tokens it makes, out of its reports, and of cache hits, out of the usage of requests."""

from __future__ import annotations

from penstock.api.replica_report import ReplicaReport
from penstock.gateway.records.facts import RequestFacts


class Production:
    """The number of tokens that one replica makes."""

    __slots__ = ("_at_s", "_boot", "_total", "rate")

    def __init__(self, report: ReplicaReport, now_s: float) -> None:
        self._boot, self._total, self._at_s = report.boot, report.measured.totals.generated_tokens, now_s
        self.rate: float | None = None  # tokens per second, between the last two reports that were looked at

    def since_last(self, report: ReplicaReport, now_s: float) -> int:
        total = report.measured.totals.generated_tokens
        made = total - self._total if report.boot == self._boot and total >= self._total else total
        self.rate = round(made / max(now_s - self._at_s, 1e-3), 1)
        self._boot, self._total, self._at_s = report.boot, total, now_s
        return made


class CacheHits:
    """Prompt tokens of requests, and those of them that came from a KV cache, as `usage` says."""

    __slots__ = ("_cached", "_input")

    def __init__(self) -> None:
        self._cached = self._input = 0

    def add(self, facts: RequestFacts) -> None:
        self._cached += facts.cached_tokens
        self._input += facts.input_tokens

    @property
    def rate(self) -> float | None:
        return round(self._cached / self._input, 4) if self._input else None
