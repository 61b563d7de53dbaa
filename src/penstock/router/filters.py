"""Filters of the replicas that can take a request at all. A filter is a reason and a function to the replicas it keeps;
the first one that drops a replica names the reason. Nearly always none is dropped, and nothing is made then: a filter
that drops none returns what it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest

Replicas = Sequence[ReplicaSnapshot]
Keep = Callable[[EdgeRequest, Replicas, float], Replicas]

_HOLDERS, _DRAWN = 32, 64  # of very many replicas: how many of each kind are scored

_READY = ReplicaState.READY
_WORKING = (ReplicaState.READY, ReplicaState.DEGRADED)


class Filter(NamedTuple):
    reason: str  # why a replica was dropped
    keep: Keep


def that_serve_model(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    model = request.model
    for replica in replicas:
        if model not in replica.models:
            return [replica for replica in replicas if model in replica.models]
    return replicas


def that_take_work(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    for r in replicas:
        if r.state is not _READY or now > r.fresh_until:
            # The first half holds nearly always, and is ten times as fast.
            return [r for r in replicas if (r.state is _READY and now <= r.fresh_until) or r.state_at(now) in _WORKING]
    return replicas


def that_are_not_tripped(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    for replica in replicas:
        if replica.is_tripped:
            return [replica for replica in replicas if not replica.is_tripped]
    return replicas


def that_fit_context(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    tokens = request.context_tokens
    if tokens is None:
        tokens = request.prompt_tokens + request.max_tokens
    for r in replicas:
        if tokens > r.limits.max_model_len or tokens > r.limits.kv_capacity_tokens:
            return [r for r in replicas if tokens <= r.limits.max_model_len and tokens <= r.limits.kv_capacity_tokens]
    return replicas


def that_are_allowed(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    allowed, avoid = request.allowed, request.avoid
    if allowed is None and not avoid:
        return replicas
    return [r for r in replicas if (allowed is None or r.id in allowed) and r.id not in avoid]


def that_have_adapter(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    adapter = request.adapter
    return [replica for replica in replicas if adapter in replica.adapters] if adapter else replicas


def that_answer(request: EdgeRequest, replicas: Replicas, now: float) -> Replicas:
    """A replica with the role prefill computes prompts for others. Where it is all that is left it answers, rather than
    nobody, if it can: at the cost of the prompts that wait there. One that needs a peer is of no use without."""
    for replica in replicas:
        if replica.role == "prefill" or replica.needs_peer:
            break
    else:
        return replicas
    answering = [replica for replica in replicas if replica.role != "prefill"]
    prefills = {r.kv_layout for r in replicas if r.needs_peer and r.role == "prefill" and _computes(r, now)}
    answering = [r for r in answering if not r.needs_peer or r.kv_layout in prefills]
    return answering or [r for r in replicas if not r.needs_peer]


def _computes(replica: ReplicaSnapshot, now: float) -> bool:
    return replica.state is _READY and now <= replica.fresh_until


MODEL = Filter("other_model", that_serve_model)
STATE = Filter("not_ready", that_take_work)
BREAKER = Filter("breaker_open", that_are_not_tripped)
CONTEXT = Filter("context_too_short", that_fit_context)
ALLOW_LIST = Filter("not_allowed", that_are_allowed)

ADAPTER = Filter("no_adapter", that_have_adapter)
ROLE = Filter("prefill_only", that_answer)

DEFAULT_FILTERS = (MODEL, STATE, BREAKER, CONTEXT, ALLOW_LIST, ADAPTER, ROLE)  # ROLE last: it looks at who is left


def prefer_ready(replicas: Replicas, now: float) -> Replicas:
    """The degraded are for when nobody else is left."""
    for r in replicas:
        if r.state is not _READY or now > r.fresh_until:
            return [r for r in replicas if r.state is _READY and now <= r.fresh_until] or replicas
    return replicas


def prefer_warm(replicas: Replicas, random01: float) -> Replicas:
    """Slow start: a replica with a share of 0.3 takes part in three picks of ten, unless nobody else is left."""
    luck = (random01 * 997.0) % 1.0  # the tie-break reads the same draw: the multiple keeps the two independent
    for r in replicas:
        if r.share <= luck:
            return [r for r in replicas if r.share > luck] or replicas
    return replicas


def narrowed(request: EdgeRequest, replicas: Replicas, index: PrefixIndex) -> Replicas:
    """Returns some of very many: those that hold most of the prompt, and a drawn part of the others for the spread."""
    step = len(replicas) // _DRAWN
    first = int(request.random01 * 991.0 % 1.0 * step)
    holders = set(index.holders(request.hashes, _HOLDERS))
    drawn = replicas[first::step]
    if not holders:
        return drawn
    return [r for r in replicas if r.id in holders] + [r for r in drawn if r.id not in holders]
