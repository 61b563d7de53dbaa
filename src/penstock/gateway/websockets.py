"""WebSockets of a gateway: every request on one is a request of its tenant, which goes the way of all others."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.app import Gateway
from penstock.gateway.tenant_services import ANYBODY
from penstock.observe.registry import Registry
from penstock.observe.websocket_catalog import WEBSOCKET_CATALOG
from penstock.websocket.endpoint import WebSockets
from penstock.websocket.settings import WebSocketSettings


def websockets(gateway: Gateway, settings: WebSocketSettings | None = None) -> WebSockets:
    """The gateway with WebSockets in front of it; what they count is exported with the rest."""
    services, registry = gateway.services, Registry(WEBSOCKET_CATALOG)
    gateway.recorder.exports.append(registry)

    def admit(headers: Mapping[bytes, bytes], peer: str) -> str:
        caller = services.caller(headers)
        return "" if caller is ANYBODY else caller.tenant.id

    return WebSockets(gateway, admit, services.pages, settings, registry)
