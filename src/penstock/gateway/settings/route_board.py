"""The routes in force on this gateway: the file's, with what was changed at run time over them, and those of models
that the file does not name though they have replicas.

Belongs to the event loop's thread. A change is a new table, so a request that is on its way keeps the route it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.router.routes import PoolShare, Route, RouteTable
from penstock.tenancy.routes import Declared, RouteRevision


class RouteBoard:
    def __init__(self, file: RouteTable) -> None:
        self.table = file
        self.changed: Callable[[RouteTable], None] = lambda table: None
        self._file = file
        self._revisions: dict[str, RouteRevision] = {}
        self._discovered: tuple[str, ...] = ()

    def declared(self) -> list[Declared]:
        """What can be changed at run time: routes with versions."""
        return [_declared(route) for route in self._file.routes.values() if route.versions]

    def apply(self, revisions: Iterable[RouteRevision]) -> None:
        """The last revision of each route that changed. What this file does not have is another gateway's."""
        self._revisions |= {one.name: one for one in revisions}
        self._update()

    def configure(self, file: RouteTable) -> None:
        """Takes the routes of a file that was read again."""
        self._file = file
        self._update()

    def discover(self, models: Iterable[str]) -> None:
        """Takes the models that have replicas. One that the file does not name gets a route of its own."""
        self._discovered = tuple(models)
        self._update()

    def _update(self) -> None:
        file = self._file.routes
        changed = [
            file[name].with_shares(one.weights, one.shadow, one.revision)
            for name, one in self._revisions.items()
            if name in file
        ]
        new = [Route(name, (PoolShare(name),)) for name in self._discovered if name not in self._file]
        table = self._file.with_routes([*changed, *new]) if changed or new else self._file
        if table.routes != self.table.routes:
            self.table = table
            self.changed(table)


def _declared(route: Route) -> Declared:
    shares = {share.pool: share for share in route.pools}
    return Declared(
        route.name,
        {version: shares[pool].weight for version, pool in route.versions.items()},
        {version: shares[pool].shadow for version, pool in route.versions.items()},
    )
