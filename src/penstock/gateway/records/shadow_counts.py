"""Outcomes of requests' copies by pool: for /metrics."""

from __future__ import annotations

from typing import NamedTuple

from penstock.gateway.records.token_usage import TokenUsage
from penstock.observe import gateway_catalog as catalog
from penstock.observe.registry import Counter, Histogram, Registry


class _Pool(NamedTuple):
    ttft: Histogram
    total: Histogram
    input: Counter
    cached: Counter
    output: Counter


class ShadowTally:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._pools: dict[str, _Pool] = {}

    def ended(
        self, pool: str, outcome: str, usage: TokenUsage | None, ttft_s: float | None, total_s: float | None
    ) -> None:
        self._registry.count(catalog.SHADOWS, pool, outcome).value += 1
        found = self._pools.get(pool) or self._open(pool)
        if ttft_s is not None:
            found.ttft.observe(ttft_s)
        if total_s is not None and outcome == "ok":
            found.total.observe(total_s)
        if usage is not None:
            found.input.value += usage.input_tokens
            found.cached.value += usage.cached_tokens
            found.output.value += usage.output_tokens

    def _open(self, pool: str) -> _Pool:
        spread, count = self._registry.spread, self._registry.count
        found = self._pools[pool] = _Pool(
            spread(catalog.SHADOW_TTFT, pool),
            spread(catalog.SHADOW_LATENCY, pool),
            *(count(catalog.SHADOW_TOKENS, pool, kind) for kind in ("input", "cached", "output")),
        )
        return found
