"""The decision of an Endpoint Picker: the gateway's own way in (route, size, prefix hashes, admission), up to the pick.

`EndpointPicker` is a gateway whose requests come from Envoy and are sent by Envoy. Tenants and keys are Envoy's affair:
a request's fairness id stands for its tenant, and its objective for its class. It knows neither gRPC nor protobufs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from penstock.api.errors import OPENAI
from penstock.core.errors import BodyTooLarge, BuffersFull, EngineUnavailable, PenstockError
from penstock.gateway.app import Gateway
from penstock.gateway.endpoint_picker.endpoints import Endpoints
from penstock.gateway.endpoint_picker.pick_exchange import Destination, PickExchange
from penstock.gateway.endpoint_picker.picked_request import PickedRequest
from penstock.gateway.proxy import refusals
from penstock.gateway.proxy.journey_shell import SizedRequest
from penstock.gateway.proxy.request_view import SURFACES, Surface, with_model
from penstock.gateway.proxy.routed_request import Arrival, RoutedRequest
from penstock.gateway.settings.gateway import GatewaySettings
from penstock.router.request import EdgeRequest
from penstock.tenancy.keys import Caller
from penstock.tenancy.tenants import CacheScope, PriorityClass, Tenant
from penstock.tenancy.usage import Usage

FAIRNESS = b"x-gateway-inference-fairness-id"
OBJECTIVE = b"x-gateway-inference-objective"
MODEL_REWRITE = b"x-gateway-model-name-rewrite"
_ANYBODY = "anonymous"
_MAX_CALLERS = 10_000
_MAX_FAIRNESS = 128  # characters of an id
_CLASSES = {one.value: one for one in PriorityClass}


class _NoLedger:
    def record(self, usage: Usage) -> None:
        """Whose request it was is not known here, and so nobody is charged."""


class _Named(msgspec.Struct):
    model: str


_named = msgspec.json.Decoder(_Named)


class EndpointPicker(Gateway):
    def __init__(self, settings: GatewaySettings, *arguments: Any, **options: Any) -> None:
        """`arguments`, `options`: a gateway's."""
        super().__init__(*arguments, **options)
        self.picking = settings.endpoint_picker
        self.endpoints = Endpoints()
        self.replicas.subscribe(self.endpoints)
        self._callers: dict[tuple[str, str], Caller] = {}
        self._max_arriving_bytes = settings.max_arriving_bytes
        self._num_arriving = 0  # bytes of bodies that Envoy has begun to send
        accounting = replace(self._proxy.accounting, ledger=_NoLedger(), prices={})
        self._picked = replace(self._proxy, accounting=accounting)

    # -- bodies

    def arrives(self, num_bytes: int, total: int) -> None:
        """A part of a body that has `total` bytes by now; `arrived` gives all of them back. Raises where they are too
        many, of this body or of all."""
        if total > self.picking.max_body_bytes:
            raise BodyTooLarge(f"the body is longer than {self.picking.max_body_bytes} bytes")
        if self._num_arriving + num_bytes > self._max_arriving_bytes:
            raise BuffersFull("too many bodies arrive at once", retry_after_s=1.0)
        self._num_arriving += num_bytes

    def arrived(self, total: int) -> None:
        self._num_arriving -= total

    # -- picks

    def pick(self, exchange: PickExchange) -> None:
        """Answers now or later. A path that the gateway does not know goes by its model alone, or to any replica."""
        request = exchange.request
        surface = SURFACES.get(request.path) if request.method == b"POST" and request.body else None
        try:
            if (name := request.headers.get(MODEL_REWRITE)) and request.body:
                request.body = with_model(request.body, name.decode(errors="replace"))
            if surface is None and _has_model(request.body):
                surface = Surface(request.path, "other", OPENAI, None, b"data: [DONE]")
            if surface is None:
                exchange.goes_to(Destination(self._anywhere(exchange)))
            else:
                self.enter(exchange, surface, self._new_id(), self._caller(request.headers))
        except PenstockError as error:
            self.refuse(exchange, error)

    def refuse(self, exchange: PickExchange, error: PenstockError) -> None:
        """Refuses a request of which nothing else is known yet."""
        surface, request_id = SURFACES.get(exchange.request.path), self._new_id()
        exchange.reason = error.reason or error.code
        refusals.respond(exchange, surface.convention if surface is not None else OPENAI, error, request_id)
        name = surface.name if surface is not None else "other"
        self.recorder.turned_away(request_id, name, error, exchange.request.headers)

    def _turn_away(self, asker: Arrival | RoutedRequest, error: PenstockError) -> None:
        if isinstance(asker.exchange, PickExchange):
            asker.exchange.reason = error.reason or error.code
        super()._turn_away(asker, error)

    def begin(self, sized: SizedRequest) -> None:
        exchange = sized.routed.exchange
        if not isinstance(exchange, PickExchange):  # the console's playground has no Envoy: it is proxied
            super().begin(sized)
            return
        # Envoy sends it: nobody tells its replica where KV blocks can be pulled from.
        allowed = self.endpoints.allowed(exchange.subset)
        request = msgspec.structs.replace(sized.request, allowed=allowed, can_pull=False)
        sized, most = msgspec.structs.replace(sized, request=request), self.picking.max_fallbacks
        PickedRequest(self._picked, self.endpoints, most, exchange, sized).begin()

    def _anywhere(self, exchange: PickExchange) -> tuple[str, ...]:
        """Endpoints for a request that names no model: the least loaded replica first."""
        now, allowed, router = self.now(), self.endpoints.allowed(exchange.subset), self.admission.router
        found: list[tuple[float, str]] = []
        for pool in self.pools:
            asked = EdgeRequest("", pool, 1, 1, allowed=allowed)
            usable, _ = router.usable(asked, self.admission.replicas(pool), now)
            found += [(one.sequences, one.id) for one in usable]
        if not found:
            raise EngineUnavailable("no replica is ready", reason="no_replica", retry_after_s=1.0)
        return self.endpoints.named(one for _, one in sorted(found)[: 1 + self.picking.max_fallbacks])

    def _caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        fairness = headers.get(FAIRNESS, b"").decode(errors="replace")[:_MAX_FAIRNESS] or _ANYBODY
        objective = headers.get(OBJECTIVE, b"").decode(errors="replace")
        named = self.picking.objectives.get(objective, objective)
        priority = _CLASSES.get(named, PriorityClass.STANDARD)
        found = self._callers.get((fairness, priority))
        if found is None:
            if len(self._callers) >= _MAX_CALLERS:
                self._callers.clear()
            tenant = Tenant(fairness, adapters=("*",), priority=priority, cache=CacheScope.SHARED, route_headers=True)
            found = self._callers[fairness, priority] = Caller(tenant, key_id="")
        return found


def _has_model(body: bytes) -> bool:
    try:
        return bool(body) and bool(_named.decode(body).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
