"""Device time that a token of each model has taken so far, by what replicas said: an estimate for unmeasured work."""

from __future__ import annotations

from penstock.core.request import Cost
from penstock.gateway.records.token_usage import TokenUsage


class DeviceTime:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float, float]] = {}  # by model: tokens, their device and KV-block seconds

    def learn(self, model: str, usage: TokenUsage, work: Cost) -> None:
        tokens, device_s, kv_block_s = self._seen.get(model, (0, 0.0, 0.0))
        self._seen[model] = tokens + usage.total, device_s + work.device_s, kv_block_s + work.kv_block_s

    def estimate(self, model: str, usage: TokenUsage) -> Cost | None:
        """Cost by the mean over all tokens, prompts and answers, cached and computed; None: not known yet."""
        tokens, device_s, kv_block_s = self._seen.get(model, (0, 0.0, 0.0))
        return Cost(device_s * usage.total / tokens, kv_block_s * usage.total / tokens) if tokens else None
