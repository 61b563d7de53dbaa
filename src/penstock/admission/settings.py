"""What an operator may set. A class is a `core.request.Priority`; these are its public names and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.request import Priority

CLASS_NAMES: Mapping[str, Priority] = {
    "interactive": Priority.HIGH,
    "standard": Priority.NORMAL,
    "batch": Priority.LOW,
}


@dataclass(frozen=True)
class ClassRules:
    max_length: int  # requests that wait; those who were told to come back may make it up to twice as long
    max_wait_s: float  # patience of a request without a deadline of its own
    aging_s: float  # after this it is overdue, and gets a part of what the higher classes take
    reserved: float = 0.0  # of every replica, kept free of lower classes while this class is in use
    kv_pressure: float = float("inf")  # refused, not queued, when KV held and asked for exceeds this many capacities


def _default_classes() -> dict[Priority, ClassRules]:
    return {
        Priority.HIGH: ClassRules(max_length=256, max_wait_s=30.0, aging_s=5.0, reserved=0.25),
        Priority.NORMAL: ClassRules(max_length=512, max_wait_s=60.0, aging_s=30.0, reserved=0.10, kv_pressure=4.0),
        Priority.LOW: ClassRules(max_length=1024, max_wait_s=300.0, aging_s=120.0, kv_pressure=2.0),
    }


@dataclass(frozen=True)
class AdmissionSettings:
    classes: Mapping[Priority, ClassRules] = field(default_factory=_default_classes)
    overdue_share: float = 0.1  # most that overdue requests may take from higher classes
    long_output_tokens: int = 2048  # from here on an output is long: refused at half the KV pressure
    in_use_s: float = 60.0  # a class or a tenant counts as in use for so long after its last request
    max_promises: int = 10_000  # kept places of refused requests, per model
    promise_grace_s: float = 5.0  # how late one may come for it
