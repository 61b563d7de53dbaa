"""Adapters that replicas have though no configuration names them: each becomes a route beside its model's.

Who may use one, a tenant's own settings say, as of any adapter. A name that a configuration gives to something is that,
and one that replicas of two models have is nobody's: it cannot be told what is meant.
"""

from __future__ import annotations

import logging

from penstock.router.routes import PoolShare, Route, RouteTable

_NOTHING: tuple[str, frozenset[str]] = ("", frozenset())

log = logging.getLogger(__name__)


class LearnedAdapters:
    def __init__(self) -> None:
        self._has: dict[str, tuple[str, frozenset[str]]] = {}  # by replica: its pool, and what it said last
        self._doubtful: set[str] = set()  # names that were complained about

    def hear(self, replica_id: str, pool: str, adapters: frozenset[str]) -> bool:
        """Whether that is anything new."""
        if self._has.get(replica_id, _NOTHING)[1] == adapters:
            return False
        self._has[replica_id] = (pool, adapters)
        return True

    def forget(self, replica_id: str) -> bool:
        """Whether it had any."""
        return bool(self._has.pop(replica_id, _NOTHING)[1])

    def over(self, table: RouteTable) -> RouteTable:
        """The table, with a route for each that it does not name."""
        models = {
            share.pool: route.name for route in table.routes.values() for share in route.own_pools if share.weight
        }
        found: dict[str, set[str]] = {}  # pools that have it
        for pool, adapters in self._has.values():
            for name in adapters if pool in models else ():
                found.setdefault(name, set()).add(pool)
        routes = []
        for name, pools in sorted(found.items()):
            owners = sorted({models[pool] for pool in pools})
            if name in table:
                continue
            if len(owners) == 1:
                routes.append(Route(name, tuple(PoolShare(pool) for pool in sorted(pools)), adapter_of=owners[0]))
            elif name not in self._doubtful:
                self._doubtful.add(name)
                log.warning("replicas of %s all have an adapter %s: nobody can ask for it", " and ".join(owners), name)
        return table.with_routes(routes) if routes else table
