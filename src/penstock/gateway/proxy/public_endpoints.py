"""The endpoints of a gateway besides those of models: /health, /ready and /v1/models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from urllib.parse import unquote

import msgspec

from penstock.api.openai.models import ModelCard, model_list, model_object
from penstock.core.config import shown
from penstock.core.errors import NotFound
from penstock.core.replica import ReplicaState
from penstock.gateway.replicas.replica import Replica
from penstock.http.exchange import Exchange
from penstock.observe import background

_MODEL = b"/v1/models/"


def show(
    exchange: Exchange,
    headers: bytes,
    replicas: Iterable[Replica],
    now: float,
    models: Callable[[Exchange], list[ModelCard]],
    model: Callable[[Exchange, str], ModelCard],
    *,
    can_hold: bool,
) -> None:
    """`models`: those that the client may use, `model`: one of them; `can_hold`: a request for a model without a
    replica waits for one. Raises NotFound where there is nothing to read."""
    request = exchange.request
    match request.path if request.method in (b"GET", b"HEAD") else b"":
        case b"/health":
            exchange.respond(200, headers, b'{"status":"ok"}')
        case b"/ready":
            is_ready = can_hold or any(replica.snapshot.state_at(now) is ReplicaState.READY for replica in replicas)
            if dead := background.dead():  # keys, limits or bills may be wrong by now
                said = {"ready": False, "reason": f"no longer running: {', '.join(dead)}; start the gateway again"}
                exchange.respond(503, headers, msgspec.json.encode(said))
                return
            status, word = (200, b"true") if is_ready else (503, b"false")
            exchange.respond(status, headers, b'{"ready":%b}' % word)
        case b"/v1/models":
            exchange.respond(200, headers, model_list(models(exchange)))
        case path if path.startswith(_MODEL):
            name = unquote(path.removeprefix(_MODEL).decode(errors="replace"))
            exchange.respond(200, headers, model_object(model(exchange, name)))
        case _:
            raise NotFound(f"no such path: {shown(request.path.decode(errors='replace'))}")
