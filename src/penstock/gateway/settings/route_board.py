"""The routes in force on this gateway: what its file says, with what was changed at run time over it.

Belongs to the event loop's thread. A change is a new table, so a request that is on its way keeps the route it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.router.routes import Route, RouteTable
from penstock.tenancy.routes import Declared, RouteRevision


class RouteBoard:
    def __init__(self, file: RouteTable) -> None:
        self.table = file
        self.changed: Callable[[RouteTable], None] = lambda table: None
        self._file = file

    def declared(self) -> list[Declared]:
        """What can be changed at run time: routes with versions."""
        return [_declared(route) for route in self._file.routes.values() if route.versions]

    def apply(self, revisions: Iterable[RouteRevision]) -> None:
        """The last revision of each route that changed. What this file does not have is another gateway's."""
        file = self._file.routes
        routes = [
            file[one.name].with_shares(one.weights, one.shadow, one.revision) for one in revisions if one.name in file
        ]
        if routes:
            self.table = self.table.with_routes(routes)
            self.changed(self.table)


def _declared(route: Route) -> Declared:
    shares = {share.pool: share for share in route.pools}
    return Declared(
        route.name,
        {version: shares[pool].weight for version, pool in route.versions.items()},
        {version: shares[pool].shadow for version, pool in route.versions.items()},
    )
