"""Service-level objectives, declared once per model: they bound the engine's steps, are counted per request, and are
what budgets, burn rates and alerts are reckoned from. A number means the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Part = Annotated[float, Meta(gt=0, lt=1)]

_HELD_BACK = 0.4  # of the time to first token; the rest is for the prompt itself


class Objective(StrEnum):
    AVAILABILITY = "availability"
    ERRORS = "errors"
    TTFT = "ttft"
    TPOT = "tpot"
    LATENCY = "latency"


TIMED = (Objective.TTFT, Objective.TPOT, Objective.LATENCY)


@dataclass(frozen=True)
class Slo:
    """The targets of one model."""

    ttft_s: Seconds = field(
        default=0.5,
        metadata={
            "help": "target for the time to first token; nobody is held back for more than 0.4 of it for tpot_s' sake"
        },
    )
    tpot_s: Seconds | None = field(
        default=0.1,
        metadata={"help": "target for the time per output token: steps are kept as short as it asks; none: no target"},
    )
    latency_s: Seconds | None = field(
        default=5.0, metadata={"help": "target for the time of a whole answer; none: no target"}
    )
    quantile: Part = field(default=0.95, metadata={"help": "share of requests that must keep these times"})
    errors: Part = field(default=0.001, metadata={"help": "share of requests that may fail"})
    availability: Part = field(default=0.999, metadata={"help": "share of time in which a replica must be there"})
    window_days: Annotated[float, Meta(gt=0, le=30)] = field(
        default=30.0, metadata={"help": "days that an error budget is for"}
    )

    @property
    def patience_s(self) -> float:
        """Seconds a prompt may be held back so that others keep their time per token."""
        return _HELD_BACK * self.ttft_s

    @property
    def window_s(self) -> float:
        return self.window_days * 86400.0

    def target(self, objective: Objective) -> float | None:
        """Seconds at the quantile, or the share that may be bad; None: there is no such objective."""
        match objective:
            case Objective.AVAILABILITY:
                return 1.0 - self.availability
            case Objective.ERRORS:
                return self.errors
            case Objective.TTFT:
                return self.ttft_s
            case Objective.TPOT:
                return self.tpot_s
            case Objective.LATENCY:
                return self.latency_s

    def allowed(self, objective: Objective) -> float:
        """The share of events that may be bad: the error budget."""
        if objective is Objective.AVAILABILITY:
            return 1.0 - self.availability
        return self.errors if objective is Objective.ERRORS else 1.0 - self.quantile
