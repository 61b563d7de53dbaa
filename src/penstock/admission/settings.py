"""Settings of admission. A class is a `core.request.Priority`; these are its public names and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.request import Priority
from penstock.core.slo import Slo

CLASS_NAMES: Mapping[str, Priority] = {
    "interactive": Priority.HIGH,
    "standard": Priority.NORMAL,
    "batch": Priority.LOW,
}


@dataclass(frozen=True)
class ClassRules:
    max_length: int  # requests that wait; those who were told to come back may make it up to twice as long
    max_wait_s: float | None  # patience of a request without a deadline of its own; None: by the model's objective
    aging_s: float  # after this it is overdue, and gets a part of what the higher classes take
    reserved: float = 0.0  # of every replica, kept free of lower classes while this class is in use
    kv_pressure: float = float(
        "inf"
    )  # refused, not queued, when what others hold and wait for exceeds this many KV capacities
    patience: float = 60.0  # where max_wait_s is None: so many times the model's `ttft_s`

    def patience_s(self, slo: Slo) -> float:
        """Returns how long one may wait for a place; one that would wait longer is refused at once."""
        return self.patience * slo.ttft_s if self.max_wait_s is None else self.max_wait_s


def _default_classes() -> dict[Priority, ClassRules]:
    return {
        Priority.HIGH: ClassRules(max_length=256, max_wait_s=None, aging_s=5.0, reserved=0.25, patience=60.0),
        Priority.NORMAL: ClassRules(
            max_length=512, max_wait_s=None, aging_s=30.0, reserved=0.10, kv_pressure=4.0, patience=120.0
        ),
        # No objective is for batch work: it waits.
        Priority.LOW: ClassRules(max_length=1024, max_wait_s=300.0, aging_s=120.0, kv_pressure=2.0),
    }


@dataclass(frozen=True)
class AdmissionSettings:
    classes: Mapping[Priority, ClassRules] = field(default_factory=_default_classes)
    overdue_share: float = 0.1  # most that overdue requests may take from higher classes
    long_output_tokens: int = 2048  # from here on an output is long: refused at half the KV pressure
    long_context: float = 0.25  # and from this share of a replica's KV on, a context
    small_context: float = 0.03  # up to this share it is small: refused at `small_pressure` times the KV pressure
    small_pressure: float = 4.0
    in_use_s: float = 60.0  # a class or a tenant counts as in use for so long after its last request
    max_promises: int = 10_000  # kept places of refused requests, per model
    promise_grace_s: float = 5.0  # how late one may come for it
