"""The place of the console, the admin API and /metrics: on loopback beside the models, elsewhere on a port of their own
or nowhere. The console's playground needs the models, so a port of its own has them too."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from penstock.cli.gateway_worker import GatewayWorker
from penstock.cli.listening import listening_socket
from penstock.console.at_gateway import ConsoleAtGateway
from penstock.console.feed import Feed
from penstock.core.errors import PenstockError
from penstock.gateway.admin.api import AdminApi, is_administration
from penstock.gateway.admin.guard import Guard
from penstock.gateway.admin.monitor import watch_views
from penstock.gateway.admin.resources import MAX_BODY_BYTES
from penstock.gateway.admin.routes import RouteDesk
from penstock.gateway.app import Gateway
from penstock.gateway.monitor.monitor import Monitor
from penstock.gateway.monitor.state import state_of
from penstock.gateway.proxy.request_view import SURFACES
from penstock.gateway.settings.gateway import LOOPBACK, GatewaySettings
from penstock.http.exchange import Exchange
from penstock.http.limits import ClientLimits
from penstock.http.message import Request
from penstock.http.server import App, BodyGate, Server
from penstock.http.tls import ServerTls
from penstock.tenancy.admins import AdminRing
from penstock.tenancy.keys import KeyRing
from penstock.tenancy.store import open_store

_GOODBYE_S = 1.0


@asynccontextmanager
async def administered(
    settings: GatewaySettings,
    store_url: str,
    gateway: Gateway,
    admins: AdminRing,
    keys: KeyRing,
    feed: Feed,
    tower: Monitor,
    tls: ServerTls | None,
    reload: Callable[[], list[str]],
    worker: GatewayWorker | None = None,
) -> AsyncIterator[tuple[App, BodyGate, str]]:
    """The app of the public port (the gateway, on loopback with the admin API beside it), the gate for its bodies, and
    where the admin API is, in words."""
    has_own_port = settings.admin_port is not None
    if not has_own_port and settings.host not in LOOPBACK:
        yield gateway, gateway, "the console, the admin API and /metrics are not served: admin_port is not set"
        return
    host = settings.admin_host if has_own_port else settings.host
    guard = Guard(admins, keys, is_loopback=host in LOOPBACK)
    console, gate = ConsoleAtGateway(feed, guard, keys), _Gate(guard, gateway)
    gateway.recorder.listeners.append(feed)
    feed.start()
    with open_store(store_url) as store:
        api = AdminApi(
            store,
            guard,
            gateway.recorder,
            lambda: state_of(gateway.replicas.values(), gateway.pools, gateway.admission, gateway.now()),
            {**RouteDesk(lambda: gateway.routes, gateway.prices, gateway.recorder).views(), **watch_views(tower)},
            reload=reload,
            has_own_port=has_own_port,
            merge=None if worker is None else worker.merge_metrics,
        )
        try:
            if settings.admin_port is None:
                where = f"the console is at /, the admin API under /admin/v1, {_who(guard)}"
                yield partial(_beside, api, console, gateway), gate, where
            else:
                limits = ClientLimits(max_body_bytes=MAX_BODY_BYTES, max_arriving_bytes=settings.max_arriving_bytes)
                server = Server(lambda exchange: _apart(api, console, gateway, exchange), limits, gate=gate)
                own_tls = tls if settings.has_admin_tls else None
                if worker is None:
                    listener = listening_socket(settings.admin_host, settings.admin_port, "admin_port")
                else:
                    listener = worker.admin_listener()
                    worker.accepts_by(server)
                await server.listen(listener, tls=own_tls)
                address = _address(listener, own_tls)
                yield gateway, gateway, f"the console is at {address}, the admin API under /admin/v1, {_who(guard)}"
                await server.stop(_GOODBYE_S)
        finally:
            feed.close()
            api.close()


class _Gate:
    """Bodies for the admin API are an admin's, and those for models a tenant's."""

    def __init__(self, guard: Guard, gateway: Gateway) -> None:
        self._guard = guard
        self._gateway = gateway

    def body_owner(self, head: Request) -> str | None:
        if not is_administration(head.path):
            return self._gateway.body_owner(head)
        self._guard.check(head)
        return "-"  # no tenant's name

    def turn_away(self, exchange: Exchange, error: PenstockError) -> None:
        if is_administration(exchange.request.path):
            exchange.refuse(error)
        else:
            self._gateway.turn_away(exchange, error)


def _beside(api: AdminApi, console: ConsoleAtGateway, gateway: Gateway, exchange: Exchange) -> None:
    target = exchange.request.target
    if target in SURFACES:  # nearly always
        gateway(exchange)
    elif AdminApi.owns(target):
        api(exchange)
    elif ConsoleAtGateway.owns(target):
        console(exchange)
    else:
        gateway(exchange)


def _apart(api: AdminApi, console: ConsoleAtGateway, gateway: Gateway, exchange: Exchange) -> None:
    target = exchange.request.target
    if ConsoleAtGateway.owns(target):
        console(exchange)
    elif target.startswith(b"/v1/") and not AdminApi.owns(target):
        gateway(exchange)
    else:
        api(exchange)


def _address(listener: socket.socket, tls: ServerTls | None) -> str:
    name, number = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{f'[{name}]' if ':' in name else name}:{number}"


def _who(guard: Guard) -> str:
    return (
        "open to everybody here: there are no tenants and no admins yet" if guard.is_open else "for admins with a key"
    )
