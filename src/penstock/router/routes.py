"""From the name a client asked for to the pools that serve it, and where to go when a route fails.

A route is data. It knows pools by name only; which replicas are in a pool is for the snapshots to say.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.config import nearest
from penstock.core.errors import ConfigError, ModelNotFound


class Failure(enum.StrEnum):
    ERROR = "error"  # no replica, or every try before the first byte failed
    SLOW = "slow"  # the first token is expected, or was seen, to take longer than the route allows
    CONTEXT_LENGTH = "context_length"


ANY_FAILURE = frozenset(Failure)


@dataclass(frozen=True)
class PoolShare:
    """A pool and its part of the route's traffic; canaries and A/B splits are shares below one."""

    pool: str
    weight: float = 1.0


@dataclass(frozen=True)
class Fallback:
    route: str
    after: frozenset[Failure] = ANY_FAILURE


@dataclass(frozen=True)
class Route:
    name: str
    pools: tuple[PoolShare, ...]
    versions: dict[str, str] = field(default_factory=dict)  # "name@version" asks for this pool alone
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    slow_after_s: float | None = None  # expected TTFT from which on a fallback for slowness is tried

    def pool(self, draw: float) -> str:
        """The pool whose part of [0, 1) the draw falls in."""
        left = draw * sum(share.weight for share in self.pools)
        for share in self.pools:
            left -= share.weight
            if left < 0:
                return share.pool
        return self.pools[-1].pool


class RouteTable:
    """Immutable: a new configuration is a new table."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = {route.name: route for route in routes}
        self._names = dict(self.routes)
        for route in self.routes.values():
            pinned = {f"{route.name}@{version}": pool for version, pool in route.versions.items()}
            for alias in route.aliases:
                self._add(alias, route)
            for name, pool in pinned.items():
                self._add(name, Route(name, (PoolShare(pool),), fallbacks=route.fallbacks))
        for route in self.routes.values():
            for fallback in route.fallbacks:
                if fallback.route not in self._names:
                    raise ConfigError(f"route '{route.name}' falls back to '{fallback.route}', which is no route")

    def _add(self, name: str, route: Route) -> None:
        if name in self._names:
            raise ConfigError(f"'{name}' names two routes: '{self._names[name].name}' and '{route.name}'")
        self._names[name] = route

    def find(self, name: str, visible: Iterable[str] | None = None) -> Route:
        """By name, alias or name@version. The hint names only what the tenant may see."""
        route = self._names.get(name)
        if route is None:
            hint = nearest(name, self.routes if visible is None else visible)
            suggestion = f"; did you mean '{hint}'?" if hint else ""
            raise ModelNotFound(f"no model '{name}'{suggestion}", param="model")
        return route

    def next_after(self, failure: Failure, tried: Sequence[str]) -> Route | None:
        """The next link of the first route's chain that is meant for this failure and was not tried.

        Only the chain of the route that was asked for counts, never the fallbacks of a fallback: what a request may
        cost and where it may end up can be read in one place.
        """
        done = {self.find(name).name for name in tried}
        for fallback in self.find(tried[0]).fallbacks:
            route = self.find(fallback.route)
            if failure in fallback.after and route.name not in done:
                return route
        return None
