"""The controller's part of the store: each round is one transaction, fenced by the lease.

It holds the replicas' rows and what gateways are told of them, pools, decisions, and once a minute the history with its
costs and what is kept over restarts. What has not changed is not written. Blocks: for threads.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from penstock.api.relay import SECRET_VARIABLE
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.observation import ReplicaState
from penstock.fleet.pool import Pool
from penstock.tenancy import fleet as tables
from penstock.tenancy.fleet import FleetReplica, ModelOrder, PoolStatus
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.replicas import RESTING, ReplicaRow
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

_SAMPLE_S = 60.0
_HIDDEN = (ReplicaState.STARTING, ReplicaState.STOPPING)  # from gateways


class Round(NamedTuple):
    """One pool in one round."""

    pool: Pool
    decision: Decision
    status: PoolStatus


class Recorder:
    def __init__(self, store: Store, fleet: str, keeper: LeaseKeeper) -> None:
        self._store = store
        self._book = store.fleet
        self._fleet = fleet
        self._keeper = keeper
        self._by = tables.member_author(fleet)
        self._rows: dict[str, FleetReplica] = {}  # as the store has them
        self._members: dict[str, ReplicaRow] = {}  # as gateways were told, by URL
        self._decided: dict[str, tuple[object, ...]] = {}  # by pool, as last recorded
        self._serves: dict[str, str] = {}  # by pool, the one that gateways know its replicas in
        self._sampled_at = 0.0

    def load(self, pools: Mapping[str, Pool], now: float) -> dict[str, FleetReplica]:
        """The last leader's replicas, and what its pools have learned. Pools that the file names no longer are
        removed. Raises PoolTaken where another fleet has a pool of the same name."""
        self._serves = {name: pool.serves for name, pool in pools.items()}
        with self._keeper.fenced() as execute:
            for pool in pools.values():
                self._book.claim_pool(execute, pool.claim(now))
        self._rows = {row.id: row for row in self._book.replicas() if row.fleet == self._fleet}
        self._members = {row.url: row for row in self._store.replicas.all() if row.by == self._by}
        for name, pool in pools.items():
            pool.restore(self._book.memory(name), now)
        self._remove_pools(but=pools)
        return dict(self._rows)

    def begin_orders(self, orders: Iterable[ModelOrder]) -> None:
        """Orders about models that share a device, as they are before anybody gives one."""
        with self._keeper.fenced() as execute:
            for order in orders:
                tables.write_model_order(execute, order)

    def write(
        self,
        rows: Mapping[str, FleetReplica],
        rounds: Sequence[Round],
        now: float,
        ended: Mapping[ModelOrder, ModelOrder] = MappingProxyType({}),
    ) -> None:
        """`ended`: orders that are done, and what is left of each. Raises LeaseLost or StoreUnavailable, and has
        written nothing then."""
        advisory = {one.pool.name for one in rounds if one.pool.settings.advisory}  # gateways find these themselves
        seen = (row for row in rows.values() if row.state not in _HIDDEN and row.url and row.pool not in advisory)
        members = {row.url: self._member(row, now) for row in seen}
        told = [row for url, row in members.items() if _differs(self._members.get(url), row)]
        gone = [row for url, row in self._members.items() if url not in members]
        decisions = [one.decision for one in rounds]
        decided = {one.pool: (one.wanted, one.warm_bound) for one in decisions}
        kept = [one for one in decisions if one.actions or self._decided.get(one.pool) != decided[one.pool]]
        is_sampled = now - self._sampled_at >= _SAMPLE_S
        with self._keeper.fenced() as execute:
            for row in rows.values():
                if self._rows.get(row.id) != row:
                    tables.write_replica(execute, row)
            for replica_id in self._rows.keys() - rows.keys():
                tables.remove_replica(execute, replica_id)
            if told or gone:
                self._book.write_members(execute, told, gone)
            for order, after in ended.items():
                tables.end_model_order(execute, order, after)
            for decision in kept:
                tables.write_decision(execute, decision.at, decision.pool, decision)
            for pool, decision, status in rounds:
                tables.write_pool(execute, status)
                if (is_sampled or decision in kept) and (round_ := pool.round()) is not None:
                    tables.write_round(execute, decision.at, pool.name, round_)
                if is_sampled:
                    own = [row for row in rows.values() if row.pool == pool.name]
                    tables.write_sample(execute, pool.sample(decision, own, now))
                    for name, document in pool.to_keep().items():
                        tables.write_memory(execute, pool.name, name, document)
        self._members, self._rows = members, dict(rows)
        self._decided |= decided
        self._sampled_at = now if is_sampled else self._sampled_at
        for decision in kept:
            for action in decision.actions:
                log.info("%s: %s %s: %s", decision.pool, action.kind, action.replica or "a replica", action.reason)

    def remove_members(self) -> None:
        """Gateways send none of the fleet's replicas anything from now on."""
        with self._keeper.fenced() as execute:
            self._book.write_members(execute, (), self._members.values())

    def remove_all(self) -> None:
        """The fleet is no more."""
        with self._keeper.fenced() as execute:
            for replica_id in self._rows:
                tables.remove_replica(execute, replica_id)
        self._remove_pools(but=())

    def _remove_pools(self, *, but: Container[str]) -> None:
        own = (one.pool for one in self._book.pools() if one.fleet == self._fleet)
        with self._keeper.fenced() as execute:
            for name in own:
                if name not in but:
                    tables.remove_pool(execute, name)

    def _member(self, row: FleetReplica, now: float) -> ReplicaRow:
        """Row of a replica for gateways."""
        return ReplicaRow(
            self._serves.get(row.pool, row.pool),
            row.url,
            row.state != ReplicaState.ACTIVE,
            {"secret_env": SECRET_VARIABLE} | ({"zone": row.zone} if row.zone else {}),
            by=self._by,
            at=now,
            state=row.state if row.state in RESTING else "",
        )


def _differs(told: ReplicaRow | None, row: ReplicaRow) -> bool:
    return told is None or replace(told, at=row.at) != row
