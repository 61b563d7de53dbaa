"""Service-level objectives, declared once. Today they set the engine's step budget; routing, admission, scaling and
alerts are to read the same object."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Slo:
    """Latency targets of one model."""

    ttft_s: float = field(default=0.2, metadata={"help": "target for the time to first token, in seconds"})
    tpot_s: float | None = field(
        default=0.1,
        metadata={"help": "target for the time per output token; steps are kept short enough for it; null: no target"},
    )
