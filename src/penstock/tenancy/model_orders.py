"""An operator's orders about models that share a device, and what is told of such models.

An order is a row of the store, which the controller follows in its next round; it is over when it is done. The same
order twice is one order, and one that cannot be followed is refused before it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Conflict, ModelNotFound
from penstock.core.residency import Residence, Wish, why_no_room
from penstock.tenancy.fleet import FleetBook, ModelOrder, ModelResidency, PoolStatus

_AWAY = (Residence.UNLOADED, Residence.PARKED, Residence.LEAVING, Residence.DRAINING)


class Verb(StrEnum):
    LOAD = "load"
    UNLOAD = "unload"
    PARK = "park"
    PIN = "pin"
    UNPIN = "unpin"
    WARM_UP = "warm-up"


class ModelMemory(Struct, frozen=True):
    """Bytes of the device."""

    fixed_bytes: int  # weights, steps and process
    floor_bytes: int  # of KV cache, at least
    kv_bytes: int  # of KV cache, now
    held_bytes: int  # now


class ModelState(Struct, frozen=True):
    """A model that shares its device with others, for operators."""

    name: str
    state: str
    pinned: bool
    order: str  # that is not done yet; empty: it comes and goes as its requests need it
    eta_s: float | None  # until it takes requests; None: it does, or nobody wants it to
    reason: str  # of its last change, or why it waits
    refusal: str  # why its requests are refused; empty: they are not
    no_room: str  # why it cannot be loaded beside the pinned models, in figures; empty: it can, or is there
    failure: str  # of its last load; empty: it succeeded
    failed_loads: int  # in a row
    in_flight: int
    waiting: int
    loads: int
    unloads: int
    loaded_at: float | None
    stays_until: float | None  # no other model takes its memory before
    used_at: float | None
    device: str
    memory: ModelMemory


class DeviceMemory(Struct, frozen=True):
    name: str
    total_bytes: int  # for all models together
    held_bytes: int
    free_bytes: int
    min_residence_s: float


class Given(NamedTuple):
    model: ModelState
    is_done: bool  # the model is what was ordered already


def models_on_devices(statuses: Iterable[PoolStatus], orders: Mapping[str, ModelOrder]) -> list[ModelState]:
    statuses = [one for one in statuses if one.residency is not None]
    return [_state(one, one.residency, orders, statuses) for one in statuses if one.residency is not None]


def devices_of(statuses: Iterable[PoolStatus]) -> list[DeviceMemory]:
    found: dict[str, list[ModelResidency]] = {}
    for one in statuses:
        if one.residency is not None:
            found.setdefault(one.residency.device, []).append(one.residency)
    return [_device(name, models) for name, models in found.items()]


def model_state(book: FleetBook, name: str) -> ModelState:
    """Raises ModelNotFound, or Conflict for a model whose replicas are not moved in and out of a device."""
    statuses = book.pools()
    status, residency = _find(statuses, name)
    return _state(status, residency, book.model_orders(), statuses)


def give_order(book: FleetBook, name: str, verb: Verb, *, drain: bool, in_flight: int, by: str, now: float) -> Given:
    """Gives an order. `drain`: a model with streams leaves when they have ended; without it such an order is refused.
    `in_flight`: requests at the model, as far as they are newer than the last status. Raises as `model_state`, and
    Conflict for an order that cannot be followed."""
    statuses, orders = book.pools(), book.model_orders()
    status, residency = _find(statuses, name)
    no_room = _no_room(status.pool, residency, orders, statuses)
    open_requests = 0 if drain else max(in_flight, residency.in_flight)

    def change(before: ModelOrder) -> ModelOrder:
        changed = _changed(before, verb, name, residency, no_room, open_requests)
        is_same = (changed.wish, changed.pinned) == (before.wish, before.pinned)
        return before if is_same else replace(changed, at=now, by=by)

    order = book.change_model_order(name, change)
    return Given(_state(status, residency, {**orders, name: order}, statuses), _is_done(verb, residency, order))


def _changed(
    before: ModelOrder, verb: Verb, name: str, residency: ModelResidency, no_room: str, open_requests: int
) -> ModelOrder:
    state = Residence(residency.state)
    match verb:
        case Verb.LOAD | Verb.WARM_UP | Verb.PIN if no_room:
            raise Conflict(no_room, reason="no_room")
        case Verb.LOAD:
            is_on_its_way = before.wish == Wish.WARM_UP or (state is Residence.LOADED and before.wish == Wish.NONE)
            return before if is_on_its_way else replace(before, wish=Wish.LOAD)
        case Verb.WARM_UP:
            return replace(before, wish=Wish.WARM_UP)
        case Verb.PIN:
            keeps = before.wish not in (Wish.UNLOAD, Wish.PARK)
            return replace(before, pinned=True, wish=before.wish if keeps else Wish.NONE)
        case Verb.UNPIN:
            return replace(before, pinned=False)
    if before.pinned:
        raise Conflict(f"{name} is pinned: unpin it before you {verb} it", reason="pinned")
    if verb is Verb.PARK and state in (Residence.UNLOADED, Residence.LEAVING):
        raise Conflict(f"{name} is {state}: there is nothing to park", reason="not_loaded")
    if open_requests and before.wish != verb:
        are = "request is" if open_requests == 1 else "requests are"
        raise Conflict(
            f'{open_requests} {are} at {name}: with {{"drain": true}} (--drain) it leaves when they have ended',
            reason="busy",
        )
    return replace(before, wish=str(verb))


def _is_done(verb: Verb, residency: ModelResidency, order: ModelOrder) -> bool:
    state = Residence(residency.state)
    match verb:
        case Verb.LOAD:
            return state is Residence.LOADED and order.wish != Wish.LOAD
        case Verb.PIN:
            return state is Residence.LOADED
        case Verb.UNLOAD:
            return state is Residence.UNLOADED
        case Verb.PARK:
            return state is Residence.PARKED
        case Verb.UNPIN:
            return True
        case Verb.WARM_UP:
            return order.wish != Wish.WARM_UP


def _find(statuses: Iterable[PoolStatus], name: str) -> tuple[PoolStatus, ModelResidency]:
    shared = []
    for one in statuses:
        if one.pool == name:
            if one.residency is None:
                raise Conflict(f"{name} shares no device with others: its replicas are those of its pool")
            return one, one.residency
        if one.residency is not None:
            shared.append(one.pool)
    known = f"they are {', '.join(shared)}" if shared else "there are none: `penstock serve A=MODEL B=MODEL` has them"
    raise ModelNotFound(f"no model '{name}' among those that share a device; {known}", param="model")


def _order_of(status: PoolStatus, residency: ModelResidency, orders: Mapping[str, ModelOrder]) -> ModelOrder:
    return orders.get(status.pool) or ModelOrder(status.pool, residency.wish, residency.pinned)


def _no_room(
    name: str, residency: ModelResidency, orders: Mapping[str, ModelOrder], statuses: Iterable[PoolStatus]
) -> str:
    """Returns why memory is too small for the model, or an empty text. It goes by the orders as they are now: the
    controller may not have seen the last pin yet."""
    if residency.state not in _AWAY:
        return ""
    staying = {
        one.pool: max(other.held_bytes, other.fixed_bytes + other.floor_bytes)
        for one in statuses
        if (other := one.residency) is not None
        and other.device == residency.device
        and one.pool != name
        and _order_of(one, other, orders).pinned
    }
    return why_no_room(name, residency.fixed_bytes, residency.floor_bytes, residency.device_bytes, staying)


def _state(
    status: PoolStatus,
    residency: ModelResidency,
    orders: Mapping[str, ModelOrder],
    statuses: Iterable[PoolStatus],
) -> ModelState:
    order = _order_of(status, residency, orders)
    is_seen = (order.wish, order.pinned) == (residency.wish, residency.pinned)  # by the controller
    is_loaded = residency.state == Residence.LOADED
    loaded_at = residency.loaded_at
    return ModelState(
        status.pool,
        residency.state,
        order.pinned,
        order.wish,
        _eta_s(status, residency, order),
        residency.reason,
        residency.refusal if is_seen else "",
        _no_room(status.pool, residency, orders, statuses),
        "" if is_loaded else status.failure,
        0 if is_loaded else status.start_failures,
        residency.in_flight,
        residency.waiting,
        residency.loads,
        residency.unloads,
        loaded_at,
        None if loaded_at is None or order.pinned else loaded_at + residency.min_residence_s,
        residency.used_at,
        residency.device,
        ModelMemory(residency.fixed_bytes, residency.floor_bytes, residency.kv_bytes, residency.held_bytes),
    )


def _eta_s(status: PoolStatus, residency: ModelResidency, order: ModelOrder) -> float | None:
    """Returns the seconds until the model is loaded, for an order that no round has seen yet, too."""
    if residency.state == Residence.LOADED:
        return None
    if status.eta_s is not None:
        return status.eta_s
    is_wanted = order.pinned or order.wish in (Wish.LOAD, Wish.WARM_UP)
    return (residency.wait_s or 0.0) + status.start_s if is_wanted else None


def _device(name: str, models: list[ModelResidency]) -> DeviceMemory:
    total_bytes, held_bytes = models[0].device_bytes, sum(one.held_bytes for one in models)
    return DeviceMemory(name, total_bytes, held_bytes, total_bytes - held_bytes, models[0].min_residence_s)
