"""A request on its way in: before its body was read, and after. What it says never changes, wherever it goes."""

from __future__ import annotations

import msgspec

from penstock.gateway.proxy.rate_limit import RateLimitReservation
from penstock.gateway.proxy.request_view import (
    TENSORS,
    RequestView,
    Surface,
    with_model,
    with_output_limit,
    with_tensor_model,
)
from penstock.gateway.proxy.ruling import Ruling
from penstock.gateway.proxy.tenant_access import TenantAccess
from penstock.gateway.rollouts.observed_request import ObservedRequest
from penstock.gateway.tokens.request_size import Size
from penstock.http.exchange import Exchange
from penstock.router.routes import Route, Target
from penstock.tenancy.keys import Caller
from penstock.tenancy.usage import Recorder

NOWHERE = Target()


class Arrival(msgspec.Struct, eq=False):
    """A request whose body nobody has read: all that its head says."""

    id: str
    exchange: Exchange
    surface: Surface
    caller: Caller
    access: TenantAccess
    entry: RateLimitReservation | None = None  # what it pays before it is read, if it is large
    ledger: Recorder | None = None  # who is told its usage in place of the gateway's ledger, if anybody is


class RoutedRequest:
    """A request that was read: who asks what of whom."""

    __slots__ = (
        "asked_for",
        "body",
        "bucket",
        "caller",
        "entry",
        "exchange",
        "expected_output",
        "id",
        "is_batch",
        "ledger",
        "observed",
        "random01",
        "route",
        "ruling",
        "surface",
        "target",
        "view",
    )

    def __init__(
        self,
        id: str,
        exchange: Exchange,
        surface: Surface,
        caller: Caller,
        view: RequestView,
        route: Route,
        random01: float,
        bucket: float,
        expected_output: int | None = None,
        ruling: Ruling | None = None,
        entry: RateLimitReservation | None = None,
        ledger: Recorder | None = None,
    ) -> None:
        self.id = id
        self.exchange = exchange
        self.body = exchange.request.body  # as the client sent it
        self.surface = surface
        self.caller = caller
        self.view = view
        self.route = route
        self.target = route.target(bucket) if route.rules is None else NOWHERE  # rules lead to another route first
        self.random01 = random01  # in [0, 1): all the chance there is in the picks of its replicas
        self.bucket = bucket  # in [0, 1): which version it falls to; a session's requests have the same
        self.expected_output = expected_output  # tokens of one answer, if the client has said so
        self.entry = entry  # what it paid before it was read, if it was large
        self.ruling = ruling  # why this route, where that was for rules to say
        self.ledger = ledger  # who is told its usage in place of the gateway's ledger, if anybody is
        self.observed: ObservedRequest | None = None  # of a model under a rollout
        self.is_batch = caller.is_batch  # nobody waits for it
        self.asked_for = route.name if ruling is None else ruling.model  # the model, before rules and versions

    def ruled(self, route: Route, ruling: Ruling) -> RoutedRequest:
        """The same request, on the route that rules chose for it."""
        return RoutedRequest(
            self.id,
            self.exchange,
            self.surface,
            self.caller,
            self.view,
            route,
            self.random01,
            self.bucket,
            self.expected_output,
            ruling,
            self.entry,
            self.ledger,
        )


def body_for(routed: RoutedRequest, size: Size, adapter: str) -> bytes:
    """A client's request as the replicas of the size's pool are sent it, for this adapter on them, if it names one."""
    body, view = routed.body, routed.view
    if not size.has_limit and size.output not in (None, routed.surface.default_output):
        body = with_output_limit(body, size.fitting_output, routed.surface.output_field)
    name = adapter or size.pool.served_as
    if view.model == name:
        return body
    return with_tensor_model(body, name) if routed.surface.path == TENSORS else with_model(body, name)
