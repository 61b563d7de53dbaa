"""Reports of replicas on themselves, from which a gateway makes its snapshots. Plain facts; what follows is policy.

A report is a moment old when it is read; a different `boot` means another process, with an empty cache. Its JSON is one
flat object: the numbers of all groups of the measurement record stand beside the report's own fields. Missing fields
have their defaults and unknown ones are ignored, so that versions may meet.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import astuple, fields

from penstock.core.measurements import EngineMeasurements
from penstock.core.settings import Role


class AdapterNews(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter that a replica serves beside its model."""

    name: str
    digest: str  # of its content
    is_on_device: bool = False  # else it takes a moment to get there


class TensorNews(msgspec.Struct, frozen=True, array_like=True):
    """A version of a model that takes tensors."""

    model: str
    version: int
    instances: int = 1
    device: str = "cpu"
    max_batch_size: int = 1
    waiting: int = 0  # requests, for a batch
    running: int = 0
    rows: int = 0  # number computed since its start
    batches: int = 0
    refused: int = 0  # requests that found the queue full, or waited in it for too long
    max_waiting: int = 0  # requests, at the default level of priority
    max_delay_s: float = 0.0  # that a request waits for others at most, while an instance is idle
    queue_s: float | None = None  # mean time that requests have waited; None: there was none


class ReplicaReport(msgspec.Struct, frozen=True):
    boot: str  # of this server process
    model: str
    state: str  # of the engine: starting, ready, parking, parked, waking, restarting, failed, stopped
    is_draining: bool = False  # takes no new work
    restarts: int = 0  # of the engine
    memory_kills: int = 0  # of the engine, by the kernel
    version: str = ""  # of penstock
    text: str = ""  # the digest of its `TokenizerBundle`; empty: it cannot be had yet
    adapters: tuple[AdapterNews, ...] = ()
    startup_s: dict[str, float] | None = None  # of its last start, phase by phase; None: it has not ended
    can_park: bool = False  # its device's memory can be given back
    role: Role = "both"
    kv_port: int = 0  # of its KV transfer; 0: it has none
    kv_layout: str = ""  # KV blocks go between replicas whose layout is the same
    takes_tensors: bool = False  # its model is none that makes text
    tensors: tuple[TensorNews, ...] = ()  # versions of such models
    measured: EngineMeasurements = EngineMeasurements()

    @property
    def shown_state(self) -> str:
        """The engine's state, in which one that is ready and takes no new work is draining."""
        return "draining" if self.is_draining and self.state == "ready" else self.state


_OWN = fields(ReplicaReport)[:-1]  # all but `measured`
_GROUPS = fields(EngineMeasurements)
_NUMBERS = [(group, number) for group in _GROUPS for number in fields(group.type)]
_Flat: Any = msgspec.defstruct(
    "ReplicaReport",
    [
        (one.name, one.type) if one.required else (one.name, one.type, one.default)
        for one in (*_OWN, *(number for _, number in _NUMBERS))
    ],
    frozen=True,
)
_values = attrgetter(
    *(one.name for one in _OWN), *(f"measured.{group.name}.{number.name}" for group, number in _NUMBERS)
)
_ends = [*accumulate((len(fields(group.type)) for group in _GROUPS), initial=len(_OWN))]
_parts = [(group.type, slice(*ends)) for group, ends in zip(_GROUPS, pairwise(_ends), strict=True)]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Flat).decode


def encode(report: ReplicaReport) -> bytes:
    return _encode(_Flat(*_values(report)))


def decode(data: bytes) -> ReplicaReport:
    """Raises `msgspec.DecodeError`."""
    values = astuple(_decode(data))
    measured = EngineMeasurements(*(group(*values[part]) for group, part in _parts))
    own = values[: len(_OWN)]
    return ReplicaReport(*(*own, measured))
