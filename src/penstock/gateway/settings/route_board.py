"""The routes in force on this gateway: the file's, with what was changed at run time over them, and those of models
and versions that the file does not name though there are pools of them.

Belongs to the event loop's thread. A change is a new table, so a request that is on its way keeps the route it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.gateway.settings.routes import VERSION_NAME
from penstock.router.routes import BASE, PoolShare, Route, RouteTable, Version, pool_of, version_key, version_of
from penstock.tenancy.routes import WHOLE, Declared, RouteRevision


class RouteBoard:
    def __init__(self, file: RouteTable) -> None:
        self.table = file
        self.changed: Callable[[RouteTable], None] = lambda table: None
        # Told what the store should be told: routes with versions that were found, and of a file that was read again.
        self.found: Callable[[list[Declared]], None] = lambda routes: None
        self.reread: Callable[[list[Declared]], None] = lambda routes: None
        self._file = file
        self._revisions: dict[str, RouteRevision] = {}
        self._discovered: dict[str, list[str]] = {}  # versions by model; a model without versions has the one BASE
        self._shares: dict[str, Declared] = {}  # of discovered versions, as the store has them
        self._told: list[Declared] = []

    def declared(self) -> list[Declared]:
        """Routes that can be changed at run time: those with versions."""
        return [_declared(route) for route in self._file.routes.values() if route.versions]

    def apply(self, revisions: Iterable[RouteRevision]) -> None:
        """The last revision of each route that changed. What this gateway does not have is another's."""
        self._revisions |= {one.name: one for one in revisions}
        self._update()

    def configure(self, file: RouteTable) -> None:
        """Takes the routes of a file that was read again."""
        before, self._file = self.declared(), file
        if (declared := self.declared()) != before:
            self.reread(declared)
        self._update()

    def discover(self, pools: Iterable[str]) -> None:
        """Takes the pools that there are. A model that the file does not name gets a route of its own, and a pool
        `model@version` that no file names is a version of its model."""
        self._discovered = {}
        for pool in pools:
            model, version = version_of(pool)
            if VERSION_NAME.fullmatch(version) and pool == pool_of(model, version):
                self._discovered.setdefault(model, []).append(version)
        self._update()

    def adopt(self, routes: Iterable[Declared]) -> None:
        """Takes the shares that discovered versions have in the store, the same for all gateways."""
        self._shares |= {route.name: route for route in routes}
        self._update()

    def _update(self) -> None:
        found = self._with_discovered()
        versioned = {name: route for name, route in found.items() if route.versions}
        known = self._file.routes | found
        for name, one in self._revisions.items():
            if name in known:
                found[name] = known[name].with_shares(one.weights, one.shadow, one.revision)
        table = self._file.with_routes(found.values()) if found else self._file
        if (declared := [_declared(route) for route in versioned.values()]) != self._told:
            self._told = declared
            self.found(declared)
        if table.routes != self.table.routes:
            self.table = table
            self.changed(table)

    def _with_discovered(self) -> dict[str, Route]:
        """Routes that the file does not have, or not with all of their versions."""
        found = {}
        for name, versions in self._discovered.items():
            route = self._file.routes.get(name)
            if route is None and name in self._file:
                continue  # the name is an alias
            if route is None and versions == [BASE]:
                found[name] = Route(name, (PoolShare(name),))
            elif route is None or (route.rules is None and route.adapter_of is None and not route.is_pipeline):
                if route is not None and not route.versions:
                    versions = [BASE, *(one for one in versions if one != BASE)]
                own = route.versions if route is not None else ()
                new = [one for one in versions if self._is_new(name, one, own)]
                if new and (route is None or own or new != [BASE]):
                    found[name] = self._with_versions(route or Route(name), new)
        return found

    def _is_new(self, model: str, version: str, own: tuple[Version, ...]) -> bool:
        """Whether neither the model nor anything else in the file has it."""
        return all(version != one.name for one in own) and version_key(model, version) not in self._file

    def _with_versions(self, route: Route, new: list[str]) -> Route:
        """The file's weights, or else the store's, count. Until one of these says something, the first version has all
        traffic: the one without a version in its pool's name, where there is one."""
        shares = self._shares.get(route.name)
        weights, shadow = (shares.weights, shares.shadow) if shares is not None else ({}, {})
        if not route.versions and not any(weights.get(one) for one in new):
            weights = {BASE if BASE in new else new[0]: WHOLE}
        added = (Version(one, weights.get(one, 0.0), shadow.get(one, 0.0), pool_of(route.name, one)) for one in new)
        return replace(route, pools=(), versions=(*route.versions, *added))


def _declared(route: Route) -> Declared:
    return Declared(
        route.name,
        {version.name: version.weight for version in route.versions},
        {version.name: version.shadow for version in route.versions},
        has_copies=not any(version.pipeline for version in route.versions),
    )
