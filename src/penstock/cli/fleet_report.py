"""`penstock fleet status`, `explain` and `cost`: what the store knows of pools, replicas, decisions and money."""

from __future__ import annotations

import argparse
import time

import msgspec

from penstock.cli.store_flags import print_json, show_time, store_url
from penstock.fleet.explain import explain
from penstock.fleet.policy.decision import Decision
from penstock.tenancy.fleet import STATUS_STALE_S, FleetBook, FleetReplica, PoolStatus
from penstock.tenancy.fleet_cost import NOBODY, PoolCost, TenantCost, cost_since, per_1000_tokens
from penstock.tenancy.prices import NANOS
from penstock.tenancy.store import open_store
from penstock.terminal.tables import print_table

_DAY_S = 86400.0
_POOL_HEAD = ("POOL", "WANTED", "BOUNDS", "STATES", "REQUESTS/S", "EXPECTED", "COST/H", "SEEN", "WHY")
_REPLICA_HEAD = ("REPLICA", "STATE", "FOR", "AGE", "ZONE", "CAPACITY", "PRICE/H", "URL")
_POOL_COST_HEAD = ("POOL", "COST", "ACTIVE", "WARM", "OTHER", "REPLICA H", "BUSY", "TOKENS", "PER 1,000 TOKENS")
_TENANT_COST_HEAD = ("TENANT", "POOL", "COST", "DEVICE S", "TOKENS", "PER 1,000 TOKENS")
_decision_decoder = msgspec.json.Decoder(Decision)


def print_status(arguments: argparse.Namespace) -> None:
    with open_store(store_url(arguments.store, arguments.config)) as store:
        pools, replicas = store.fleet.pools(), store.fleet.replicas()
    if arguments.json:
        print_json({"pools": pools, "replicas": replicas})
        return
    if not pools:
        print("no controller has written to this store yet: `penstock fleet --config FILE` starts one")
        return
    now = time.time()
    print_table(_POOL_HEAD, [_pool_row(one, now) for one in pools])
    if replicas:
        print()
        print_table(_REPLICA_HEAD, [_replica_row(one, now) for one in replicas])
    for one in pools:
        if now - one.at > STATUS_STALE_S:
            print(
                f"\n{one.pool}: no controller has looked at it for {now - one.at:.0f} s; its replicas go on as they are"
            )
        if one.start_failures:
            print(f"\n{one.pool}: the last {one.start_failures} starts failed: {one.failure}")


def _pool_row(one: PoolStatus, now: float) -> tuple[str, ...]:
    return (
        one.pool,
        str(one.wanted),
        f"{one.min}..{one.max}",
        ", ".join(f"{count} {state}" for state, count in sorted(one.states.items())) or "-",
        f"{one.arrivals_per_s:.2f}",
        f"{one.forecast_p50:.2f} to {one.forecast_p90:.2f}" if one.forecast_p90 else "-",
        f"{one.cost_per_hour:.2f}" if one.cost_per_hour else "-",
        f"{now - one.at:.0f} s ago",
        one.reason or "-",
    )


def _replica_row(one: FleetReplica, now: float) -> tuple[str, ...]:
    return (
        one.id,
        one.state if one.state == one.target else f"{one.state} -> {one.target}",
        f"{now - one.since:.0f} s",
        f"{now - one.created_at:.0f} s",
        one.zone or "-",
        one.capacity_type,
        f"{one.price_per_hour:.2f}" if one.price_per_hour else "-",
        one.url or "-",
    )


def print_decisions(arguments: argparse.Namespace) -> None:
    with open_store(store_url(arguments.store, arguments.config)) as store:
        if arguments.at is not None:
            found = _in_force(store.fleet, arguments.name, arguments.at)
        else:
            since = arguments.since or 0.0
            rows = store.fleet.decisions(arguments.name, since=since, limit=arguments.last + 1)
            found = _with_neighbours([_decision_decoder.decode(one.document) for one in rows])
            found = found[-arguments.last :]
    if arguments.json:
        print_json([decision for _, decision, _ in found])
        return
    for before, decision, after in found:
        print(*explain(decision, before, after if arguments.at is not None else None), sep="\n")
    if not found:
        print("no decision is recorded" + (" for that time" if arguments.at is not None else ""))


_Neighbours = tuple[Decision | None, Decision, Decision | None]


def _with_neighbours(newest_first: list[Decision]) -> list[_Neighbours]:
    """Each with the decisions of its pool before and after it, oldest first."""
    ordered = newest_first[::-1]
    found: list[_Neighbours] = []
    for index, one in enumerate(ordered):
        before = next((each for each in reversed(ordered[:index]) if each.pool == one.pool), None)
        after = next((each for each in ordered[index + 1 :] if each.pool == one.pool), None)
        found.append((before, one, after))
    return found


def _in_force(book: FleetBook, pool: str | None, at: float) -> list[_Neighbours]:
    """The decision of each pool that held at that time."""
    pools = [pool] if pool is not None else [one.pool for one in book.pools()]
    found = []
    for name in pools:
        earlier = [_decode(one.document) for one in book.decisions(name, until=at, limit=2)]
        later = [_decode(one.document) for one in book.decisions(name, since=at, limit=1, is_oldest_first=True)]
        if earlier:
            found.append((earlier[1] if len(earlier) > 1 else None, earlier[0], later[0] if later else None))
    return found


def _decode(document: msgspec.Raw) -> Decision:
    return _decision_decoder.decode(document)


def print_cost(arguments: argparse.Namespace) -> None:
    since = arguments.since if arguments.since is not None else time.time() - _DAY_S
    with open_store(store_url(arguments.store, arguments.config)) as store:
        found = cost_since(store, since)
    if arguments.json:
        print_json({"since": found.since, arguments.by + "s": found.document(arguments.by)})
    elif not found.pools:
        print(f"no controller has written to this store since {show_time(since)}")
    elif arguments.by == "pool":
        print_table(_POOL_COST_HEAD, [_pool_cost_row(one) for one in found.pools])
    else:
        print_table(_TENANT_COST_HEAD, [_tenant_cost_row(one) for one in found.tenants])


def _pool_cost_row(one: PoolCost) -> tuple[str, ...]:
    active, warm = one.by_state.get("active", 0), sum(one.by_state.get(state, 0) for state in ("standby", "parked"))
    return (
        one.pool,
        *map(_money, (one.nanos, active, warm, one.nanos - active - warm)),
        f"{sum(one.replica_s.values()) / 3600:.2f}",
        f"{one.busy:.0%}" if one.busy is not None else "-",
        *_per_tokens(one),
    )


def _tenant_cost_row(one: TenantCost) -> tuple[str, ...]:
    tenant = "(nobody used it)" if one.tenant == NOBODY else one.tenant
    return tenant, one.pool, _money(one.nanos), f"{one.device_s:,.1f}", *_per_tokens(one)


def _per_tokens(one: PoolCost | TenantCost) -> tuple[str, str]:
    price = per_1000_tokens(one.nanos, one.tokens)
    return f"{one.tokens:,}", f"{price:.6f}" if price is not None else "-"


def _money(nanos: int) -> str:
    return f"{nanos / NANOS:,.4f}"
