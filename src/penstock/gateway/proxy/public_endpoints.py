"""The endpoints of a gateway besides those of models: /health, /ready and /v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.api.openai.models import ModelCard, model_list
from penstock.core.config import shown
from penstock.core.errors import NotFound
from penstock.core.replica import ReplicaState
from penstock.http.exchange import Exchange
from penstock.observe import background

if TYPE_CHECKING:
    from penstock.gateway.app import Gateway


def show(gateway: Gateway, exchange: Exchange, headers: bytes) -> None:
    """Raises NotFound where there is nothing to read."""
    request = exchange.request
    match request.path if request.method in (b"GET", b"HEAD") else b"":
        case b"/health":
            exchange.respond(200, headers, b'{"status":"ok"}')
        case b"/ready":
            now = gateway.now()
            is_ready = any(r.snapshot.state_at(now) is ReplicaState.READY for r in gateway.replicas.values())
            if dead := background.dead():  # keys, limits or bills may be wrong by now
                said = {"ready": False, "reason": f"no longer running: {', '.join(dead)}; start the gateway again"}
                exchange.respond(503, headers, msgspec.json.encode(said))
                return
            status, word = (200, b"true") if is_ready else (503, b"false")
            exchange.respond(status, headers, b'{"ready":%b}' % word)
        case b"/v1/models":
            models = [gateway.routes.find(name) for name in gateway.visible_models(exchange)]
            cards = [ModelCard(id=one.name, created=gateway.started_s, parent=one.adapter_of) for one in models]
            exchange.respond(200, headers, model_list(cards))
        case _:
            raise NotFound(f"no such path: {shown(request.path.decode(errors='replace'))}")
