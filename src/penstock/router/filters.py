"""Who can take a request at all. A filter is a reason and a test; the first test that fails names the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.core.replica import STALE_AFTER_S, ReplicaSnapshot, ReplicaState
from penstock.router.request import EdgeRequest

Test = Callable[[EdgeRequest, ReplicaSnapshot, float], bool]


class Filter(NamedTuple):
    reason: str  # why a replica was dropped
    keeps: Test


def serves_model(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> bool:
    return request.model in replica.models


def takes_work(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> bool:
    if replica.state is ReplicaState.READY and now - replica.taken_at <= STALE_AFTER_S:
        return True  # nearly always, and ten times as fast
    return replica.state_at(now) in (ReplicaState.READY, ReplicaState.DEGRADED)


def is_not_tripped(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> bool:
    return not replica.is_tripped


def fits_context(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> bool:
    tokens = request.prompt_tokens + request.max_tokens
    return tokens <= replica.max_context_tokens and tokens <= replica.kv_capacity_tokens


def is_allowed(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> bool:
    return (request.allowed is None or replica.id in request.allowed) and replica.id not in request.avoid


MODEL = Filter("other_model", serves_model)
STATE = Filter("not_ready", takes_work)
BREAKER = Filter("breaker_open", is_not_tripped)
CONTEXT = Filter("context_too_short", fits_context)
ALLOW_LIST = Filter("not_allowed", is_allowed)

DEFAULT_FILTERS = (MODEL, STATE, BREAKER, CONTEXT, ALLOW_LIST)


def prefer_ready(replicas: Sequence[ReplicaSnapshot], now: float) -> Sequence[ReplicaSnapshot]:
    """The degraded are for when nobody else is left."""
    ready = [r for r in replicas if r.state is ReplicaState.READY and now - r.taken_at <= STALE_AFTER_S]
    return ready or replicas


def prefer_warm(replicas: Sequence[ReplicaSnapshot], draw: float) -> Sequence[ReplicaSnapshot]:
    """Slow start: a replica with a share of 0.3 takes part in three picks of ten, unless nobody else is left."""
    luck = (draw * 997.0) % 1.0  # the tie-break reads the same draw: the multiple keeps the two independent
    warm = [r for r in replicas if r.share > luck]
    return warm or replicas
