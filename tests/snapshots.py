"""Snapshots of replicas by the names of the numbers that matter to a test, whichever group they are in."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from penstock.core.measurements import EngineLoad, ServingLimits
from penstock.core.replica import UNKNOWN_LIMITS, ReplicaSnapshot

_LIMITS, _LOAD = ServingLimits.__struct_fields__, EngineLoad.__struct_fields__


def snapshot(id: str, **facts: Any) -> ReplicaSnapshot:
    limits = {name: facts.pop(name) for name in _LIMITS if name in facts}
    load = {name: facts.pop(name) for name in _LOAD if name in facts}
    return ReplicaSnapshot(id=id, limits=replace(UNKNOWN_LIMITS, **limits), load=EngineLoad(**load), **facts)
