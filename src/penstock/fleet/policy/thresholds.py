"""Plain thresholds (`scale_on`) in place of the prediction: one replica more above one, one less if all stay below."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.fleet.policy.observation import Demand
from penstock.fleet.settings import Signal

_FIELDS: dict[Signal, str] = {
    "waiting": "waiting",
    "wait_s": "wait_p95_s",
    "ttft_s": "ttft_p95_s",
    "tpot_s": "tpot_p95_s",
    "latency_s": "latency_p99_s",
    "kv_usage": "kv_usage",
    "memory_headroom": "memory_headroom",
    "active_sequences": "active_sequences",
    "tokens_per_s": "tokens_per_s",
    "gpu_utilisation": "gpu_utilisation",
}
_HYSTERESIS = 0.9


def needed_by_thresholds(scale_on: Mapping[Signal, float], demand: Demand, num_active: int) -> tuple[int, str]:
    """Replicas, and why. Large pools move by a tenth. Headroom is a threshold from below."""
    step = max(1, num_active // 10)
    fewer = num_active - step
    spare = f"all signals stay below their thresholds with {fewer}"
    for signal, threshold in scale_on.items():
        value = getattr(demand, _FIELDS[signal])
        if signal == "memory_headroom":
            value, threshold = 1.0 - value, 1.0 - threshold
        if value > threshold:
            return num_active + step, f"{signal} of {getattr(demand, _FIELDS[signal]):.3g} is beyond its threshold"
        if fewer < 1 or value * num_active / fewer > _HYSTERESIS * threshold:
            spare = ""
    return (fewer, spare) if spare else (num_active, "no signal is beyond its threshold")
