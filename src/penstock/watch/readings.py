"""Readings of a fleet that the watch is told of at each tick: plain facts, in no engine's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from msgspec import Struct

from penstock.core.devices import DeviceReading


class ReplicaReading(Struct, frozen=True, kw_only=True):
    model: str
    replica: str
    is_usable: bool  # a request could be sent to it now
    is_reachable: bool = True
    is_starting: bool = False  # its process is there and loads its model
    is_resting: bool = False  # without traffic on purpose, as one that is parked: that it cannot be used is no fault
    is_draining: bool = False  # or was, when it was last heard of
    boot: str = ""  # of its process; empty: it does not say
    restarts: int = 0  # of its engine
    memory_kills: int = 0
    device_fault: str = ""  # why one of its devices gets no more work
    kv_fragmentation: float | None = None  # the part of what sequences hold of its KV cache that they do not fill


class PoolReading(Struct, frozen=True, kw_only=True):
    """A pool as its controller last left it."""

    model: str
    age_s: float = 0.0  # since then
    wanted: int = 0
    num_active: int = 0
    bound: str = ""  # what keeps it from the size that the demand needs
    arrivals_per_s: float = 0.0
    start_p95_s: float = 0.0
    oldest_start_s: float = 0.0  # of the starts under way
    failed_starts: int = 0  # in a row
    failure: str = ""
    reversals: int = 0  # steps of the last hour that were soon taken back


class RolloutReading(Struct, frozen=True, kw_only=True):
    """A rollout as its runner last left it."""

    model: str
    id: str
    new: str  # version
    phase: str
    age_s: float = 0.0  # since it came into its phase
    limit_s: float | None = None  # how long it may be in that; None: as long as it likes
    reason: str = ""
    is_ordered: bool = False  # it is as it is because an operator said so


class FleetReading(Struct, frozen=True):
    replicas: Sequence[ReplicaReading] = ()
    waiting: Mapping[str, int] = {}  # requests at the gateway, by model
    devices: Sequence[DeviceReading] = ()
    managed: Set[str] = frozenset()  # models whose replicas a controller keeps: to have none is no fault
    pools: Sequence[PoolReading] = ()  # that a controller manages
    rollouts: Sequence[RolloutReading] = ()  # that are on, or ended lately
