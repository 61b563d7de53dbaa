"""An order about a model that shares its device, followed from outside: the server's words about the model say whether
it is done. No I/O: whoever follows it asks."""

from __future__ import annotations

from msgspec import Struct

from penstock.core.errors import Conflict, EngineFailed

MODELS_PATH = "/v1/penstock/models"
LOOK_S = 0.25  # how often a follower may ask
_SETTLED = {"load": ("loaded",), "warm-up": ("loaded",), "unload": ("unloaded",), "park": ("parked", "unloaded")}


class ModelSeen(Struct, frozen=True):
    """Status of a model, with the fields that an order needs."""

    name: str
    state: str
    order: str
    eta_s: float | None
    refusal: str
    failure: str
    failed_loads: int


class FollowedOrder:
    def __init__(self, verb: str, given: ModelSeen) -> None:
        """`given`: the server's answer to the order."""
        self._verb = verb
        self._order, self._failed_loads = given.order, given.failed_loads

    def is_done(self, model: ModelSeen) -> bool:
        """Raises EngineFailed where the load fails, Conflict where another order has come meanwhile or it cannot be."""
        is_settled = model.state in _SETTLED[self._verb]
        # A load or warm-up is over when its order is: what is loaded now may be about to leave by the order before.
        if is_settled and not (model.order == self._verb and self._verb in ("load", "warm-up")):
            return True
        if model.failed_loads > self._failed_loads:
            raise EngineFailed(f"{model.name}: {model.failure}")
        if self._verb in ("load", "warm-up") and model.refusal:
            raise Conflict(model.refusal, reason="no_room")
        if model.order not in ("", self._order):
            raise Conflict(f"{model.name}: another order came, to {model.order} it")
        if not model.order and model.eta_s is None and not is_settled:
            raise Conflict(f"{model.name}: the order was done, and the model is {model.state} again")
        return False
