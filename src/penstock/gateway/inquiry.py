"""A request that was read: who asks what of whom. It never changes, wherever the request goes."""

from __future__ import annotations

from penstock.gateway.asked import Asked, Surface
from penstock.gateway.http.exchange import Exchange
from penstock.router.routes import Route
from penstock.tenancy.keys import Caller


class Inquiry:
    __slots__ = ("asked", "caller", "draw", "exchange", "id", "route", "surface")

    def __init__(
        self, id: str, exchange: Exchange, surface: Surface, caller: Caller, asked: Asked, route: Route, draw: float
    ) -> None:
        self.id = id
        self.exchange = exchange
        self.surface = surface
        self.caller = caller
        self.asked = asked
        self.route = route
        self.draw = draw  # in [0, 1): all the chance there is in what becomes of it

    @property
    def body(self) -> bytes:
        """As the client sent it."""
        return self.exchange.request.body
