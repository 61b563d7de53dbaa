"""Ready replicas of a model's versions, as this gateway sees them: for the runner of rollouts, on its thread.

Nobody's knowledge is not nothing: a gateway that has just begun, or was just told of a version, has not reached its
replicas yet.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.tokens.pools import Pools
from penstock.router.routes import RouteTable, Version

CONNECTING_S = 15.0  # from the first question on: replicas that are there are reached by then


class Readiness:
    def __init__(self, table: Callable[[], RouteTable], pools: Pools, now: Callable[[], float]) -> None:
        """`now`: of a clock that never runs backwards."""
        self._table = table
        self._pools = pools
        self._now = now
        self._asked_at: dict[tuple[str, str], float] = {}  # first
        self._were_ready: set[tuple[str, str]] = set()

    def has(self, model: str, version: str) -> bool:
        """Whether the version is in this gateway's configuration."""
        return self._find(model, version) is not None

    def num_ready(self, model: str, version: str) -> int | None:
        """Replicas that can answer the version now. None: this gateway does not know. A pipeline is ready where it
        is."""
        found, key = self._find(model, version), (model, version)
        if found is None:
            return None
        ready = 1 if found.pipeline else self._pools.num_ready({share.pool for share in found.shares})
        if ready:
            self._were_ready.add(key)
            return ready
        now = self._now()
        is_known = key in self._were_ready or now - self._asked_at.setdefault(key, now) >= CONNECTING_S
        return 0 if is_known else None

    def _find(self, model: str, version: str) -> Version | None:
        route = self._table().routes.get(model)
        return next((one for one in route.versions if one.name == version), None) if route is not None else None
