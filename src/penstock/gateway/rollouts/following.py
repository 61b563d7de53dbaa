"""The rollouts that are on, as this gateway follows them: whose requests are measured, and who stays with the old one.

Belongs to the event loop. A request of a model without a rollout costs one look into a dict.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from penstock.core.replica import ReplicaSnapshot
from penstock.core.rollout import Arm, RolloutOrder
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.rollouts.load import LoadMeter
from penstock.gateway.rollouts.observation import Observation
from penstock.router.routes import Route, RouteTable, Target
from penstock.router.sticky import is_among
from penstock.tenancy.tenants import Tenant

if TYPE_CHECKING:
    from penstock.gateway.proxy.routed_request import RoutedRequest

log = logging.getLogger(__name__)

MAX_KEPT_BYTES = 256 << 10  # of one answer; a longer one is not compared
_MAX_ALL_KEPT_BYTES = 64 << 20


class Sink(Protocol):
    """A receiver of what was observed, in the event loop."""

    def add(self, seen: Observation) -> None: ...


Check = Callable[["FollowedRollout", Arm, "RoutedRequest", bytes], object]


class Nobody:
    """Where nothing is written: a gateway without a store."""

    def add(self, seen: Observation) -> None: ...


class FollowedRollout:
    __slots__ = ("_arms", "_new", "_old", "_owner", "new_version", "old_version", "order")

    def __init__(self, owner: Rollouts, order: RolloutOrder, route: Route) -> None:
        self._owner = owner
        self.order = order
        versions = {version.name: version for version in route.versions}
        self._old, self._new = versions[order.old], versions[order.new]
        self.old_version, self.new_version = route.key(self._old), route.key(self._new)
        self._arms = {self.old_version: Arm.OLD, self.new_version: Arm.NEW}

    def arm(self, version: str) -> Arm | None:
        """Arm of a version's key. None: the rollout does not touch that version."""
        return self._arms.get(version)

    def old_target(self, bucket: float) -> Target:
        return self._old.target(self.old_version, bucket)

    def new_target(self, bucket: float) -> Target:
        return self._new.target(self.new_version, bucket)

    def stays(self, tenant: Tenant) -> bool:
        """Whether the old version answers this tenant until the new one is everybody's."""
        return self.opted_out(tenant) and not self.order.is_held

    def opted_out(self, tenant: Tenant) -> bool:
        """Its requests are no fair sample of either version's, and none of them is copied."""
        return tenant.stays or tenant.id in self.order.staying

    def is_copied(self, bucket: float) -> bool:
        """Whether such a request may be sent to both versions, beside its answer."""
        shadow = self._new.shadow
        return self.order.control and shadow > 0 and is_among(bucket, self.new_version, shadow)

    def price(self, arm: Arm) -> float | None:
        """Price of a device-hour; None: it has none."""
        is_new = arm in (Arm.NEW, Arm.NEW_COPY)
        return self.order.prices.get(self.order.new if is_new else self.order.old)

    def tell(self, seen: Observation) -> None:
        self._owner.sink.add(seen)

    def check(self, arm: Arm, routed: RoutedRequest, answer: bytes) -> None:
        """A client's answer, whose request says what it is to be like."""
        self._owner.check(self, arm, routed, answer)

    def is_settled(self, began_s: float) -> bool:
        return began_s >= self.order.settle_until

    def is_warm(self, replica_id: str) -> bool:
        """False: the replica has just joined, and its cache is cold."""
        return self._owner.is_warm(replica_id)

    def load_of(self, seen: ReplicaSnapshot) -> LoadMeter | None:
        """Begins to measure a replica's load. None: it has just gone."""
        return self._owner.load_of(seen)

    def wall(self) -> float:
        return self._owner.wall()

    def take_room(self, num_bytes: int) -> bool:
        """For an answer that is kept to be compared; `give_room` gives it back."""
        owner = self._owner
        if owner.kept_bytes + num_bytes > _MAX_ALL_KEPT_BYTES:
            return False
        owner.kept_bytes += num_bytes
        return True

    def give_room(self, num_bytes: int) -> None:
        self._owner.kept_bytes -= num_bytes

    def route_of_staying(self, route: Route) -> Route:
        """All to the old version, and no copies."""
        versions = (replace(one, weight=float(one is self._old), shadow=0.0) for one in route.versions)
        return replace(route, versions=tuple(versions))


class Rollouts:
    def __init__(
        self, replicas: Mapping[str, Replica], now: Callable[[], float], wall: Callable[[], float] = time.time
    ) -> None:
        self.by_route: dict[str, FollowedRollout] = {}
        self.sink: Sink = Nobody()
        self.wall = wall
        self.check: Check = lambda rollout, arm, routed, answer: None  # told of answers that can be checked
        self.kept_bytes = 0  # of answers that may be compared
        self._replicas = replicas
        self._now = now
        self._orders: tuple[RolloutOrder, ...] = ()
        self._tables: dict[frozenset[str], RouteTable] = {}  # by the models whose old version is stayed with
        self._doubtful: set[str] = set()  # rollouts that were complained about

    @property
    def orders(self) -> tuple[RolloutOrder, ...]:
        return self._orders

    def apply(self, orders: Iterable[RolloutOrder]) -> None:
        """Takes the rollouts that are on; `use` has to follow."""
        self._orders = tuple(order for order in orders if not order.is_over)

    def use(self, routes: RouteTable) -> None:
        """Takes routes for requests that come."""
        self._tables = {}
        self.by_route = {}
        for order in self._orders:
            route = routes.routes.get(order.model)
            if route is not None and {order.old, order.new} <= {one.name for one in route.versions}:
                self.by_route[order.model] = FollowedRollout(self, order, route)
            elif order.id not in self._doubtful:
                self._doubtful.add(order.id)
                log.warning(
                    "rollout %s of '%s' from %s to %s: this gateway has no such versions, and measures nothing",
                    order.id,
                    order.model,
                    order.old,
                    order.new,
                )

    def routes_for(self, tenant: Tenant, routes: RouteTable) -> RouteTable:
        """The table as this tenant's requests are routed by: with the old version alone, where it stays."""
        staying = frozenset(model for model, followed in self.by_route.items() if followed.stays(tenant))
        if not staying:
            return routes
        if staying not in self._tables:
            changed = [self.by_route[model].route_of_staying(routes.routes[model]) for model in staying]
            self._tables[staying] = routes.with_routes(changed)
        return self._tables[staying]

    def find(self, route: Route) -> FollowedRollout | None:
        """The rollout that requests on this route are part of. One that asks for a version by name is not."""
        found = self.by_route.get(route.name)
        if found is None and route.adapter and route.adapter_of is not None:  # served by the versions of its model
            found = self.by_route.get(route.adapter_of)
        return found

    def load_of(self, seen: ReplicaSnapshot) -> LoadMeter | None:
        replica = self._replicas.get(seen.id)
        return None if replica is None else LoadMeter(replica, seen.sequences)

    def is_warm(self, replica_id: str) -> bool:
        replica = self._replicas.get(replica_id)
        return replica is not None and not replica.health.is_warming_up(self._now())
