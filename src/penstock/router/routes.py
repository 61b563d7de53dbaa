"""Routes from the name a client asked for to the pools that serve it, and where to go when a route fails.

A route is data. It knows pools by name only; which replicas are in a pool is for the snapshots to say. One that decides
by what a request is like (`rules`) has no pools, but names the route it goes on to.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock.core.config import nearest, shown
from penstock.core.errors import ConfigError, ModelNotFound
from penstock.router.rules import RuleSet
from penstock.router.sticky import is_among, race, rehashed


class Failure(enum.StrEnum):
    ERROR = "error"  # no replica, too much is asked of them, or every try before the first byte failed
    SLOW = "slow"  # the first byte takes longer than the route allows
    CONTEXT_LENGTH = "context"


ANY_FAILURE = frozenset(Failure)
BASE = "base"  # the version whose pool has no version in its name


@dataclass(frozen=True)
class PoolShare:
    """A pool and its part of a route's traffic."""

    pool: str
    weight: float = 1.0
    version: str = ""  # the one whose part it is, as name@version; empty: its route has none


class Target(NamedTuple):
    """The target of a request: replicas of a pool, with an adapter or without; or a pipeline."""

    pool: str = ""
    version: str = ""  # the key that it is measured by, name@version; empty: the route has no versions
    adapter: str = ""  # that the replicas must have
    pipeline: str = ""  # in place of a pool


@dataclass(frozen=True)
class Version:
    """One of several that share a route's traffic; canaries and A/B splits are shares below one.

    It has a pool of its own, or the pools of another model, in that one's shares, or is a pipeline. On pools of either
    kind it may be an adapter, so that several versions are on the same replicas.
    """

    name: str
    weight: float = 0.0
    shadow: float = 0.0  # of the traffic of the other versions, how much it is sent a copy of
    pool: str = ""
    of: str = ""  # the model whose pools it has, or one version of that: name@version
    adapter: str = ""
    pipeline: str = ""
    shares: tuple[PoolShare, ...] = ()  # the pools that it is on, as its table finds them

    def target(self, key: str, bucket: float) -> Target:
        if self.pipeline:
            return Target("", key, "", self.pipeline)
        return Target(_share(self.shares, rehashed(bucket)).pool, key, self.adapter)


@dataclass(frozen=True)
class Fallback:
    route: str
    after: frozenset[Failure] = ANY_FAILURE


@dataclass(frozen=True)
class Route:
    name: str
    pools: tuple[PoolShare, ...] = ()  # of a route with versions: all of theirs, as its table finds them
    versions: tuple[Version, ...] = ()  # "name@version" asks for one alone
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    slow_after_s: float | None = None  # to the first byte; from then on a fallback for slowness is tried
    rules: RuleSet | None = None  # it has these instead of pools
    version_of: str | None = None  # of "name@version": the name
    revision: int = 0  # of the weights; 0: as the file has them
    adapter_of: str | None = None  # it is a LoRA adapter of this route's model, or has versions that are
    is_pipeline: bool = False  # it has steps instead of pools, each of which is routed by itself, or versions that have

    @property
    def adapter(self) -> str:
        """The adapter that its replicas must have; empty: none, or that is for its versions to say."""
        return self.name if self.adapter_of is not None and not self.versions else ""

    @cached_property
    def model(self) -> str:
        """The name that a tenant must be allowed."""
        return self.name if self.version_of is None else self.version_of

    @cached_property
    def _only_target(self) -> Target | None:
        """The target of all of its requests; None: there are several."""
        if self.versions or self.is_pipeline or len(self.pools) != 1:
            return None
        return Target(self.pools[0].pool, self.pools[0].version, self.adapter)

    @property
    def own_pools(self) -> tuple[PoolShare, ...]:
        """The pools that are of no other route, and have no adapter there."""
        if self.adapter_of is not None or not self.versions:
            return () if self.adapter_of is not None else self.pools
        return tuple(PoolShare(v.pool, v.weight, self.key(v)) for v in self.versions if v.pool)

    def key(self, version: Version) -> str:
        """The version's name to clients, and in metrics, logs, usage and comparisons."""
        return version_key(self.model, version.name)

    def target(self, bucket: float) -> Target:
        """Returns the target of a bucket in [0, 1), always the same while the weights are: a session has one bucket."""
        if self._only_target is not None:
            return self._only_target
        if self.versions:
            keys = {self.key(version): version for version in self.versions}
            key = race(bucket, [(key, version.weight) for key, version in keys.items()])
            return keys[key].target(key, bucket)
        if self.is_pipeline:
            return Target(pipeline=self.name)
        share = _share(self.pools, bucket)
        return Target(share.pool, share.version, self.adapter)

    def targets(self) -> list[Target]:
        """All that have a part of its traffic, each once."""
        if not self.versions:
            if self.is_pipeline:
                return [Target(pipeline=self.name)]
            return [Target(share.pool, share.version, self.adapter) for share in self.pools if share.weight]
        found = []
        for version in self.versions if len(self.versions) == 1 else (v for v in self.versions if v.weight):
            key = self.key(version)
            if version.pipeline:
                found.append(Target("", key, "", version.pipeline))
            found += [Target(share.pool, key, version.adapter) for share in version.shares if share.weight]
        return found

    def shadows(self, bucket: float, answered: str) -> list[Target]:
        """Those that are sent a copy of what the version `answered`, by its key, has answered."""
        if not self.versions:
            return []
        return [
            version.target(key, bucket)
            for version in self.versions
            if version.shadow and (key := self.key(version)) != answered and is_among(bucket, key, version.shadow)
        ]

    def with_shares(self, weights: Mapping[str, float], shadows: Mapping[str, float], revision: int) -> Route:
        """Returns the route with these shares by version. A version not named keeps its own, an unknown name is
        ignored; if the weights come to nothing, the route stays as it is."""
        versions = tuple(
            replace(
                version,
                weight=weights.get(version.name, version.weight),
                shadow=shadows.get(version.name, version.shadow),
            )
            for version in self.versions
        )
        if not sum(version.weight for version in versions):
            return self
        return replace(self, versions=versions, revision=revision)


def version_key(model: str, version: str) -> str:
    return f"{model}@{version}"


def pool_of(model: str, version: str) -> str:
    """The pool of a version that has one of its own."""
    return model if version == BASE else version_key(model, version)


def version_of(pool: str) -> tuple[str, str]:
    """The model and the version that a pool is of, by its name."""
    model, _, version = pool.partition("@")
    return model, version or BASE


def _share(shares: Sequence[PoolShare], bucket: float) -> PoolShare:
    if len(shares) == 1:
        return shares[0]
    pool = race(bucket, [(share.pool, share.weight) for share in shares])
    return next(share for share in shares if share.pool == pool)


class RouteTable:
    """Immutable: a new configuration is a new table."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._given = {route.name: route for route in routes}
        self.routes = _resolved(self._given)
        self._names = dict(self.routes)
        for route in self.routes.values():
            for alias in route.aliases:
                self._add(alias, route)
            for version in route.versions:
                alone = replace(route, name=route.key(version), versions=(version,), pools=version.shares, aliases=())
                self._add(alone.name, replace(alone, version_of=route.name, is_pipeline=bool(version.pipeline)))
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
        return RouteTable((self._given | {route.name: route for route in changed}).values())

    def find(self, name: str, visible: Iterable[str] | None = None) -> Route:
        """Returns a route by name, alias or name@version. The hint names only what the tenant may see."""
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


def _resolved(routes: dict[str, Route]) -> dict[str, Route]:
    """The same routes, with the pools that adapters and versions have by other routes."""
    found = dict(routes)
    for name, route in routes.items():
        if route.adapter_of is not None and not route.versions:
            found[name] = _adapter(route, routes.get(route.adapter_of))
    for name, route in routes.items():
        if route.versions:
            versions = tuple(_version(route, version, found) for version in route.versions)
            pools = [replace(share, version=route.key(one)) for one in versions for share in one.shares]
            total = {one.name: sum(share.weight for share in one.shares) or 1.0 for one in versions}
            weights = [one.weight / total[one.name] * share.weight for one in versions for share in one.shares]
            shares = tuple(replace(share, weight=weight) for share, weight in zip(pools, weights, strict=True))
            found[name] = replace(route, versions=versions, pools=shares)
    return found


def _adapter(route: Route, base: Route | None) -> Route:
    """An adapter is where its model is, in the same shares, or in those of its pools that have it; nothing of it is
    copied to other versions."""
    shares = base.own_pools if base is not None and base.rules is None else ()
    if not shares:
        said = f"'{route.name}' is an adapter of '{route.adapter_of}', which is no model with replicas"
        raise ConfigError(said, param=f"{route.name}.adapters")
    own = {share.pool for share in route.pools}
    return replace(route, pools=_usable([share for share in shares if not own or share.pool in own]))


def _version(route: Route, version: Version, routes: Mapping[str, Route]) -> Version:
    if version.pipeline:
        return replace(version, shares=())
    if version.pool:
        return replace(version, shares=(PoolShare(version.pool),))
    base_name, _, pinned = version.of.partition("@")
    base, adapter = routes.get(version.of) or routes.get(base_name), routes.get(version.adapter)
    shares = list(base.own_pools) if base is not None and base.rules is None else []
    if base is not None and base.name != version.of:
        shares = [share for share in shares if share.version == version_key(base_name, pinned)]
    elif adapter is not None and adapter.adapter_of == version.of:
        shares = list(adapter.pools)  # where it was found, if no configuration says where it is
    if not shares:
        raise ConfigError(
            f"version '{version.name}' of '{route.name}' is on replicas of '{version.of}', which has none of its own",
            param=f"{route.name}.versions.{version.name}",
        )
    return replace(version, shares=_usable([replace(share, version="") for share in shares]))


def _usable(shares: Sequence[PoolShare]) -> tuple[PoolShare, ...]:
    """The same, with equal parts where none has any: their own route sends its requests elsewhere, with an adapter."""
    has_weight = any(share.weight for share in shares)
    return tuple(shares) if has_weight else tuple(replace(share, weight=1.0) for share in shares)
