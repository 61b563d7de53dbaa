"""Reload: the configuration is read again while the gateway runs. Models, routing and objectives can change."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable

from penstock.admission.admission import Admission
from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.gateway.membership.membership import Membership
from penstock.gateway.pipelines.graph import Pipeline
from penstock.gateway.pipelines.service import PipelineService, with_pipelines
from penstock.gateway.settings.gateway import GatewaySettings, pools_of, routes_of, splits_of
from penstock.gateway.settings.monitor import slos_of
from penstock.gateway.settings.route_board import RouteBoard
from penstock.gateway.tokens.pools import Pools
from penstock.router.router import Router
from penstock.tenancy.prices import Price
from penstock.watch.watch import Watch

log = logging.getLogger("penstock.gateway")

_RELOADABLE = {"models", "pipelines", "routing", "slo"}


class Configuration:
    """Settings in force that can change at run time."""

    def __init__(
        self,
        settings: GatewaySettings,
        routes: RouteBoard,
        membership: Membership,
        pools: Pools,
        admission: Admission,
        prices: dict[str, Price],
        pipelines: PipelineService | None = None,
        read_pipelines: Callable[[Iterable[str]], list[Pipeline]] = lambda _: [],
    ) -> None:
        """`read_pipelines`: from their files."""
        self.settings = settings
        self.read: Callable[[], GatewaySettings] | None = None  # from the file again; None: there is no file
        self._routes = routes
        self._membership = membership
        self._pools = pools
        self._admission = admission
        self._prices = prices
        self._pipelines = pipelines
        self._read_pipelines = read_pipelines
        self._watch: Watch | None = None
        self._now: Callable[[], float] = lambda: 0.0
        self._slos: dict[str, Slo] = {}
        self._managed: frozenset[str] = frozenset()
        membership.changed = self._members_changed

    def follow(self, watch: Watch, now: Callable[[], float]) -> None:
        """Tells a watch which models there are."""
        self._watch, self._now = watch, now
        self._members_changed()

    def manage(self, pools: Iterable[str]) -> None:
        """Takes the pools that controllers have: their models exist without a replica, too."""
        self._managed = frozenset(pools)
        self._members_changed()

    def reload(self) -> list[str]:
        """Reads the file again and takes it. Raises ConfigError, and nothing has changed then. Returns the settings
        that have changed, by name."""
        if self.read is None:
            raise ConfigError("this gateway has no configuration file")
        new = self.read()
        fields = [field.name for field in dataclasses.fields(GatewaySettings)]
        changed = [name for name in fields if getattr(new, name) != getattr(self.settings, name)]
        if fixed := [name for name in changed if name not in _RELOADABLE]:
            raise ConfigError(
                f"{', '.join(fixed)} cannot change while the gateway runs: start it again, or take that back; nothing "
                "has changed",
                param=fixed[0],
            )
        if self.apply(new) and "pipelines" not in changed:
            changed.append("pipelines")
        return changed

    def apply(self, settings: GatewaySettings) -> bool:
        """Raises ConfigError before anything has changed. Returns whether a pipeline has, in its file."""
        models = settings.pools()
        pools, slos = pools_of(models), slos_of(settings.slo, models)
        pipelines = self._read_pipelines(settings.pipelines)
        routes = with_pipelines(routes_of(models), pipelines)
        own_routing = {name: pool.routing for name, pool in pools.items() if pool.routing is not None}
        Router.from_settings(settings.routing, own_routing)  # raises if a strategy cannot be built
        self._membership.configure(pools)
        self.settings = settings
        for name, pool in pools.items():  # of one that has no replicas yet, too
            self._pools[name].served_as = pool.served_as or name
        self._slos = dict(slos)
        self._admission.router.configure(settings.routing, own_routing, splits_of(pools))
        self._admission.configure(slos, {name: pool.hold_s for name, pool in pools.items() if pool.hold_s is not None})
        self._prices.clear()
        self._prices.update({name: pool.price for name, pool in pools.items()})
        has_changed = self._pipelines is not None and self._pipelines.use(pipelines)
        self._routes.configure(routes)
        self._members_changed()
        return has_changed

    def _members_changed(self) -> None:
        pools = self._managed.union(self._membership.pools)
        self._routes.discover(sorted(pools))
        if self._watch is None:
            return
        slos = {name: self._slos.get(name, self.settings.slo) for name in pools}
        for name in set(self._watch.models) - slos.keys():
            self._watch.model_removed(name)
        for name, slo in slos.items():
            self._watch.model_added(name, slo, self._now())
