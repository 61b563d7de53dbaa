"""The pool of each model, made when somebody first needs it: a pool may be empty, and new ones may appear."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor

from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import Subscriber
from penstock.gateway.tokens.request_size import Pool


class Pools(Mapping[str, Pool], Subscriber):
    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._pools: dict[str, Pool] = {}

    def __getitem__(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = Pool(self._threads, name)
        return pool

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def replica_added(self, replica: Replica) -> None:
        pool = self[replica.model]
        pool.served_as = replica.served_as
        pool.num_replicas += 1

    def replica_changed(self, replica: Replica) -> None:
        self[replica.model].replica_changed(replica)

    def replica_removed(self, replica: Replica) -> None:
        self[replica.model].replica_removed(replica)

    def num_ready(self, names: Collection[str]) -> int:
        """Replicas of these pools, on any thread: no pool is made by asking."""
        found = (self._pools.get(name) for name in names)
        return sum(pool.num_ready for pool in found if pool is not None)

    def keep(self, names: set[str]) -> None:
        """Forgets the pools that no route leads to any more and that have no replicas."""
        for name in [one for one, pool in self._pools.items() if one not in names and not pool.num_replicas]:
            del self._pools[name]
