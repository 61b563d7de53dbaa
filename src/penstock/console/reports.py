"""What a penstock replica's reports say beyond the moment: rates, out of totals that start again with every engine."""

from __future__ import annotations

from penstock.api.replica_report import ReplicaReport


class Production:
    """How many tokens one replica makes."""

    __slots__ = ("_at_s", "_boot", "_total", "rate")

    def __init__(self, report: ReplicaReport, now_s: float) -> None:
        self._boot, self._total, self._at_s = report.boot, report.generated_tokens, now_s
        self.rate: float | None = None  # tokens per second, between the last two reports that were looked at

    def since_last(self, report: ReplicaReport, now_s: float) -> int:
        is_same = report.boot == self._boot and report.generated_tokens >= self._total
        made = report.generated_tokens - self._total if is_same else report.generated_tokens
        self.rate = round(made / max(now_s - self._at_s, 1e-3), 1)
        self._boot, self._total, self._at_s = report.boot, report.generated_tokens, now_s
        return made


def hit_rate(report: ReplicaReport) -> float | None:
    """The share of prompt tokens that were in the cache, since the engine's start."""
    return round(report.cached_tokens / report.prompt_tokens, 4) if report.prompt_tokens else None
