"""The policy's answer: actions on replicas, each with its reason and the numbers that led to it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from penstock.fleet.policy.observation import CapacityType, ReplicaState


class ActionKind(StrEnum):
    START = "start"  # a new replica, which becomes `to`
    WAKE = "wake"  # parked to `to` (standby or active)
    ACTIVATE = "activate"  # standby to active
    DEACTIVATE = "deactivate"  # active to standby, drained first
    PARK = "park"  # drained first
    STOP = "stop"  # drained first


class Action(Struct, frozen=True, omit_defaults=True):
    kind: ActionKind
    reason: str  # one plain clause: "predicted TTFT p95 of 1.4 s breaks the SLO of 1 s"
    replica: str = ""  # empty: a new one
    to: ReplicaState = ReplicaState.ACTIVE
    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    grace_s: float | None = None  # a stop that must be over by then; None: as long as streams take
    numbers: dict[str, float] = field(default_factory=dict)


class Decision(Struct, frozen=True, omit_defaults=True):
    """One round for one pool. A round without actions is recorded only when `wanted` changed."""

    pool: str
    at: float
    wanted: int  # active replicas
    standby: int = 0  # planned
    parked: int = 0
    actions: tuple[Action, ...] = ()
    reason: str = ""  # why `wanted` is what it is
    bound: str = ""  # min, max, spend, quota or schedule, if one of them decided
    warm_bound: str = ""  # max, spend or quota, if it keeps standby or parked replicas from what is planned
    numbers: dict[str, float] = field(default_factory=dict)  # predicted TTFT, TPOT, KV use; rate; forecast
