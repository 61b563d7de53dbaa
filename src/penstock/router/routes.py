"""From the name a client asked for to the pools that serve it, and where to go when a route fails.

A route is data. It knows pools by name only; which replicas are in a pool is for the snapshots to say. Who decides by
what a request is like (`rules`) has no pools, but names the route it goes on to.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.core.config import nearest, shown
from penstock.core.errors import ConfigError, ModelNotFound
from penstock.router.rules import RuleSet
from penstock.router.sticky import is_among, race


class Failure(enum.StrEnum):
    ERROR = "error"  # no replica, too much is asked of them, or every try before the first byte failed
    SLOW = "slow"  # the first byte takes longer than the route allows
    CONTEXT_LENGTH = "context"


ANY_FAILURE = frozenset(Failure)


@dataclass(frozen=True)
class PoolShare:
    """A pool and its part of the route's traffic; canaries and A/B splits are shares below one."""

    pool: str
    weight: float = 1.0
    shadow: float = 0.0  # of the traffic of the other pools, how much it is sent a copy of


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
    slow_after_s: float | None = None  # to the first byte; from then on a fallback for slowness is tried
    rules: RuleSet | None = None  # it has these instead of pools
    version_of: str | None = None  # of "name@version": the name
    revision: int = 0  # of the weights; 0: as the file has them
    adapter_of: str | None = None  # it is a LoRA adapter of this route's model, on the same pools
    is_pipeline: bool = False  # it has steps instead of pools, each of which is routed by itself

    @property
    def adapter(self) -> str:
        """That its replicas must have; empty: none."""
        return self.name if self.adapter_of is not None else ""

    @property
    def model(self) -> str:
        """The name that a tenant must be allowed."""
        return self.name if self.version_of is None else self.version_of

    def pool(self, bucket: float) -> str:
        """The pool that a lot in [0, 1) falls to, always the same while the weights are: a session has one lot."""
        pools = self.pools
        return pools[0].pool if len(pools) == 1 else race(bucket, [(share.pool, share.weight) for share in pools])

    def shadows(self, bucket: float, pool: str) -> list[str]:
        """The pools that are sent a copy of what `pool` answered."""
        shares = self.pools
        return [s.pool for s in shares if s.shadow and s.pool != pool and is_among(bucket, s.pool, s.shadow)]

    def with_shares(self, weights: Mapping[str, float], shadows: Mapping[str, float], revision: int) -> Route:
        """By version. What is not named stays, what is not known is nobody's; weights that come to nothing are none."""
        versions = {pool: version for version, pool in self.versions.items()}
        pools = tuple(
            replace(
                share,
                weight=weights.get(versions.get(share.pool, ""), share.weight),
                shadow=shadows.get(versions.get(share.pool, ""), share.shadow),
            )
            for share in self.pools
        )
        if not sum(share.weight for share in pools):
            return self
        return replace(self, pools=pools, revision=revision)


class RouteTable:
    """Immutable: a new configuration is a new table."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = _with_adapters({route.name: route for route in routes})
        self._names = dict(self.routes)
        for route in self.routes.values():
            pinned = {f"{route.name}@{version}": pool for version, pool in route.versions.items()}
            for alias in route.aliases:
                self._add(alias, route)
            for name, pool in pinned.items():
                alone = (PoolShare(pool),)
                self._add(name, replace(route, name=name, pools=alone, versions={}, aliases=(), version_of=route.name))
        for route in self.routes.values():
            for fallback in route.fallbacks:
                self._check(f"route '{route.name}' falls back to", fallback.route, f"{route.name}.fallback")
            for target in route.rules.targets if route.rules is not None else ():
                self._check(f"the rules of '{route.name}' lead to", target, f"{route.name}.rules")

    def _add(self, name: str, route: Route) -> None:
        if name in self._names:
            said = f"'{name}' names two routes: '{self._names[name].name}' and '{route.name}'"
            raise ConfigError(said, param=f"{route.version_of or route.name}.aliases")
        self._names[name] = route

    def _check(self, what: str, name: str, param: str) -> None:
        if name not in self._names:
            hint = nearest(name, self._names)
            suggestion = f"; did you mean '{hint}'?" if hint else ""
            raise ConfigError(f"{what} '{name}', which is no route{suggestion}", param=param)
        if self._names[name].rules is not None:
            said = f"{what} '{name}', which has rules of its own: where that ends could not be seen here"
            raise ConfigError(said, param=param)
        if self._names[name].is_pipeline:
            raise ConfigError(f"{what} '{name}', which is a pipeline and no model", param=param)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @property
    def names(self) -> list[str]:
        """All that a client can ask for: routes, aliases and versions."""
        return list(self._names)

    def with_routes(self, changed: Iterable[Route]) -> RouteTable:
        """Another table, with these in place of those of their names."""
        return RouteTable((self.routes | {route.name: route for route in changed}).values())

    def find(self, name: str, visible: Iterable[str] | None = None) -> Route:
        """By name, alias or name@version. The hint names only what the tenant may see."""
        route = self._names.get(name)
        if route is None:
            hint = nearest(name, self.routes if visible is None else visible)
            suggestion = f"; did you mean '{hint}'?" if hint else ""
            raise ModelNotFound(f"no model '{shown(name)}'{suggestion}", param="model")
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


def _with_adapters(routes: dict[str, Route]) -> dict[str, Route]:
    """An adapter is where its model is, in the same shares, or in those of its pools that have it; nothing of it is
    copied to other versions."""
    found = dict(routes)
    for name, route in routes.items():
        if route.adapter_of is not None:
            base = routes.get(route.adapter_of)
            if base is None or base.rules is not None or base.adapter_of is not None or base.is_pipeline:
                raise ConfigError(f"'{name}' is an adapter of '{route.adapter_of}', which is no model with replicas")
            own = {share.pool for share in route.pools}
            shares = [replace(share, shadow=0.0) for share in base.pools if not own or share.pool in own]
            found[name] = replace(route, pools=tuple(shares))
    return found
