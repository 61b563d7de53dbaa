"""Routes in the admin API: how they stand on this gateway, and how the store is told to change them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.core.errors import Conflict, ModelNotFound
from penstock.gateway.admin.resources import Action, AdminCall, Answer, Shape
from penstock.gateway.monitor.state import RouteView, route_shown
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.router.routes import Route, RouteTable
from penstock.tenancy.documents import route_document
from penstock.tenancy.prices import Price
from penstock.tenancy.routes import SharesAsked
from penstock.tenancy.store import Store
from penstock.tenancy.times import moment

View = Callable[[AdminCall], object]
_HOUR_S = 3600.0
_shares_asked_decoder = msgspec.json.Decoder(SharesAsked)


class PromotionAsked(Struct, forbid_unknown_fields=True):
    version: str


_promotion_asked_decoder = msgspec.json.Decoder(PromotionAsked)


class RollbackAsked(Struct, forbid_unknown_fields=True):
    to: Annotated[int, Meta(ge=0)] | None = None  # a revision; 0: the file; none: the one before


_rollback_asked_decoder = msgspec.json.Decoder(RollbackAsked)


class RouteDesk:
    """View of this gateway's routes, read on the event loop."""

    def __init__(
        self, routes: Callable[[], RouteTable], prices: Mapping[str, Price], recorder: GatewayRecorder
    ) -> None:
        """`routes`: those in force now; `prices`: by pool."""
        self._routes = routes
        self._prices = prices
        self._recorder = recorder

    def views(self) -> Mapping[Shape, View]:
        return {
            ("routes",): self._list,
            ("routes", None): lambda call: self._show(self._find(call.name)),
            ("routes", None, "compare"): self._compare,
            ("routes", None, "rules"): self._rules,
        }

    def _list(self, call: AdminCall) -> object:
        return {"routes": [self._show(route) for route in self._routes().routes.values()]}

    def _show(self, route: Route) -> RouteView:
        return route_shown(route, self._prices)

    def _compare(self, call: AdminCall) -> object:
        route, query = self._find(call.name), call.query("since")
        if not route.versions:
            raise Conflict(f"'{route.name}' has no versions to compare")
        since_s = moment(query["since"]) if "since" in query else time.time() - _HOUR_S
        versions = self._recorder.versions.since({one.name: route.key(one) for one in route.versions}, since_s)
        return {"name": route.name, "since": since_s, "revision": route.revision, "versions": versions}

    def _rules(self, call: AdminCall) -> object:
        route = self._find(call.name)
        if route.rules is None:
            raise Conflict(f"'{route.name}' has no rules")
        return self._recorder.rules.document(route.name, route.rules)

    def _find(self, name: str) -> Route:
        route = self._routes().routes.get(name)
        if route is None:
            raise ModelNotFound(f"no model '{name}'")
        return route


# -- the store


def _change(store: Store, call: AdminCall) -> Answer:
    return Answer(200, route_document(store.routes.change(call.name, call.body(_shares_asked_decoder), by=call.admin)))


def _promote(store: Store, call: AdminCall) -> Answer:
    version = call.body(_promotion_asked_decoder).version
    return Answer(200, route_document(store.routes.promote(call.name, version, by=call.admin)))


def _roll_back(store: Store, call: AdminCall) -> Answer:
    to = call.body(_rollback_asked_decoder).to
    return Answer(200, route_document(store.routes.roll_back(call.name, to, by=call.admin)))


ROUTE_RESOURCES: dict[Shape, dict[str, Action]] = {
    ("routes", None): {"PATCH": _change},
    ("routes", None, "promote"): {"POST": _promote},
    ("routes", None, "rollback"): {"POST": _roll_back},
    ("routes", None, "history"): {
        "GET": lambda store, call: Answer(200, {"revisions": store.routes.history(call.name)}),
    },
}
