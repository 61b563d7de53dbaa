"""Models that share a device in the admin API: how each stands, and orders to load, unload, park, pin and warm up.

GET  /v1/penstock/models                 every model, and the memory of their device
GET  /v1/penstock/models/NAME
POST /v1/penstock/models/NAME/load       200: it is loaded; 202: it will be, in `eta_s`
POST /v1/penstock/models/NAME/unload     {"drain": true}: it goes when its streams have ended; else they are a 409
POST /v1/penstock/models/NAME/park       likewise
POST /v1/penstock/models/NAME/pin, unpin, warm-up
"""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from penstock.api.model_order import MODELS_PATH
from penstock.gateway.admin.resources import Action, AdminCall, Answer, Shape
from penstock.tenancy.model_orders import Verb, devices_of, give_order, model_state, models_on_devices
from penstock.tenancy.store import Store

PREFIX = MODELS_PATH.encode()


class OrderAsked(Struct, forbid_unknown_fields=True):
    drain: bool = False  # streams of a model that is to leave end first


_order_asked_decoder = msgspec.json.Decoder(OrderAsked)


def _list(store: Store, call: AdminCall) -> Answer:
    call.query()
    statuses = store.fleet.pools()
    models = models_on_devices(statuses, store.fleet.model_orders())
    return Answer(200, {"at": time.time(), "devices": devices_of(statuses), "models": models})


def _show(store: Store, call: AdminCall) -> Answer:
    call.query()
    return Answer(200, model_state(store.fleet, call.name))


def _order(store: Store, call: AdminCall) -> Answer:
    verb, drain = Verb(call.path[-1]), call.body(_order_asked_decoder).drain
    given = give_order(
        store.fleet,
        call.name,
        verb,
        drain=drain,
        in_flight=call.in_flight.get(call.name, 0),
        by=call.admin,
        now=time.time(),
    )
    return Answer(200 if given.is_done else 202, given.model)


_ORDER: dict[str, Action] = {"POST": _order}
MODEL_RESOURCES: dict[Shape, dict[str, Action]] = {
    ("models",): {"GET": _list},
    ("models", None): {"GET": _show},
    **{("models", None, str(verb)): _ORDER for verb in Verb},
}
