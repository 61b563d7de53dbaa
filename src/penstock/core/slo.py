"""Service-level objectives, declared once. Today they bound the engine's step and are counted per request; routing,
admission, scaling and alerts are to read the same object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class Slo:
    """Latency targets of one model."""

    ttft_s: Seconds = field(
        default=0.2,
        metadata={
            "help": "target for the time to first token; nobody is held back longer than this for the sake of tpot_s"
        },
    )
    tpot_s: Seconds | None = field(
        default=0.1,
        metadata={"help": "target for the time per output token: steps are kept as short as it asks; none: no target"},
    )
