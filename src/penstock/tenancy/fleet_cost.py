"""Cost of a fleet's pools, and each tenant's part of it.

A pool costs what its replicas cost in every state: at work, idle, warm, starting and draining. Tenants pay for all of
it, in the ratio of their device time in the same hour; an hour that nobody used is shared by the use of the whole time
that is asked about. Money is counted in whole nanos, so that the parts are the sum.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from penstock.tenancy.fleet import FleetSample
from penstock.tenancy.prices import NANOS
from penstock.tenancy.store import Store
from penstock.tenancy.usage import HOUR_S, TenantUsage

NOBODY = ""  # a pool's cost in a time in which nobody used it at all
_HALF_SAMPLE_S = 30.0  # a sample is of the minute before


class PoolCost(Struct, frozen=True, kw_only=True):
    pool: str
    nanos: int
    by_state: dict[str, int] = field(default_factory=dict)  # in nanos
    replica_s: dict[str, float] = field(default_factory=dict)  # by state
    device_s: float = 0.0  # in which tenants' requests were computed
    tokens: int = 0  # of prompts and answers

    @property
    def busy(self) -> float | None:
        """Share of the active replicas' time in which they worked; None: none was active."""
        active_s = self.replica_s.get("active", 0.0)
        return self.device_s / active_s if active_s else None


class TenantCost(Struct, frozen=True, kw_only=True):
    tenant: str
    pool: str
    nanos: int
    device_s: float = 0.0
    tokens: int = 0


class FleetCost(Struct, frozen=True):
    since: float
    pools: list[PoolCost]
    tenants: list[TenantCost]  # in a pool, their nanos are its nanos

    def document(self, by: Literal["pool", "tenant"]) -> list[dict[str, object]]:
        return [_document(one) for one in (self.pools if by == "pool" else self.tenants)]


def share_out(total: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Whole parts of a whole, in the ratio of the weights, whose sum is not 0. What rounding leaves goes to those who
    lost most by it."""
    sum_ = sum(weights.values())
    parts = {name: total * weight // sum_ for name, weight in weights.items()}
    by_loss = sorted(weights, key=lambda name: (-(total * weights[name] % sum_), name))
    for name in by_loss[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def cost_since(store: Store, since: float) -> FleetCost:
    """Returns the cost from the beginning of the hour of `since` until now. Blocks."""
    since = float(int(since) // HOUR_S * HOUR_S)
    used = store.usage.by_tenant(since_s=since, until_s=time.time())
    return fleet_cost(since, store.fleet.history(since=since), used)


def fleet_cost(since: float, samples: Iterable[FleetSample], used: Iterable[TenantUsage]) -> FleetCost:
    """`used`: by tenant, model and hour, of the same time as the samples. A model's name is its pool's."""
    by_pool: dict[str, list[FleetSample]] = {}
    for sample in samples:
        by_pool.setdefault(sample.pool, []).append(sample)
    found: dict[str, list[TenantUsage]] = {pool: [] for pool in by_pool}
    for one in used:
        if one.model in found:
            found[one.model].append(one)
    pools, tenants = [], []
    for pool, history in sorted(by_pool.items()):
        cost = _pool_cost(pool, history, found[pool])
        pools.append(cost)
        tenants += _tenant_costs(cost, history, found[pool])
    return FleetCost(since, pools, tenants)


def _pool_cost(pool: str, history: Sequence[FleetSample], used: Sequence[TenantUsage]) -> PoolCost:
    by_state: dict[str, int] = {}
    replica_s: dict[str, float] = {}
    for sample in history:
        for state, cost in sample.costs.items():
            by_state[state] = by_state.get(state, 0) + _nanos(cost)
        for state, seconds in sample.seconds.items():
            replica_s[state] = replica_s.get(state, 0.0) + seconds
    return PoolCost(
        pool=pool,
        nanos=sum(_nanos(sample.cost) for sample in history),
        by_state=by_state,
        replica_s=replica_s,
        device_s=sum(one.device_us for one in used) / 1e6,
        # Each misses something: samples the time without a controller, the book adapters, which have their own names.
        tokens=max(sum(one.tokens for one in used), sum(sample.tokens for sample in history)),
    )


def _tenant_costs(cost: PoolCost, history: Sequence[FleetSample], used: Sequence[TenantUsage]) -> list[TenantCost]:
    by_hour: dict[int, list[TenantUsage]] = {}
    for one in used:
        by_hour.setdefault(one.hour, []).append(one)
    hours: dict[int, int] = {}
    for sample in history:
        hour = int(sample.at - _HALF_SAMPLE_S) // HOUR_S * HOUR_S
        hours[hour] = hours.get(hour, 0) + _nanos(sample.cost)
    nanos: dict[str, int] = {}
    idle = 0
    for hour, whole in hours.items():
        weights = _weights(by_hour.get(hour, ()))
        if not weights:
            idle += whole
            continue
        for tenant, part in share_out(whole, weights).items():
            nanos[tenant] = nanos.get(tenant, 0) + part
    for tenant, part in share_out(idle, _weights(used) or {NOBODY: 1}).items():
        if part:
            nanos[tenant] = nanos.get(tenant, 0) + part
    return [
        TenantCost(
            tenant=tenant,
            pool=cost.pool,
            nanos=nanos.get(tenant, 0),
            device_s=sum(one.device_us for one in used if one.tenant == tenant) / 1e6,
            tokens=sum(one.tokens for one in used if one.tenant == tenant),
        )
        for tenant in sorted({*nanos, *(one.tenant for one in used)})
    ]


def _weights(used: Iterable[TenantUsage]) -> dict[str, int]:
    """Device time by tenant; tokens where replicas measure none. Empty: nobody used anything."""
    device: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for one in used:
        device[one.tenant] = device.get(one.tenant, 0) + one.device_us
        tokens[one.tenant] = tokens.get(one.tenant, 0) + one.tokens
    return next((found for found in (device, tokens) if any(found.values())), {})


def _nanos(cost: float) -> int:
    return round(cost * NANOS)


def per_1000_tokens(nanos: int, tokens: int) -> float | None:
    return 1000 * nanos / NANOS / tokens if tokens else None


def _document(one: PoolCost | TenantCost) -> dict[str, object]:
    found: dict[str, object] = {"pool": one.pool}
    if isinstance(one, TenantCost):
        found["tenant"] = one.tenant
    found |= {"cost": one.nanos / NANOS, "cost_per_1000_tokens": per_1000_tokens(one.nanos, one.tokens)}
    if isinstance(one, PoolCost):
        found["cost_by_state"] = {state: nanos / NANOS for state, nanos in one.by_state.items()}
        found |= {"replica_s": one.replica_s, "busy": one.busy}
    return found | {"tokens": one.tokens, "device_s": one.device_s}
