"""The device that the models of one server share: what is seen of their replicas becomes a view for the residency
policy, and its aims become actions on replicas.

Every model is a pool of one replica, whose life is the fleet's (`fleet.lifecycle`); only what a replica is to be is
decided here, for all models together, and not by each pool's own policy. No I/O, no clock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.residency import Residence, Wish
from penstock.core.settings import EngineSettings
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import PoolObservation, ReplicaState, ReplicaView
from penstock.fleet.residency.memory_plan import ModelNeeds, beside
from penstock.fleet.residency.policy import Aim, ModelView, Rules, decide
from penstock.tenancy.fleet import ModelOrder, ModelResidency

_BLIND_S = 1.0  # a driver that does not list its replicas is asked again after so long
_STATES = {
    ReplicaState.STARTING: Residence.LOADING,
    ReplicaState.STANDBY: Residence.LOADING,
    ReplicaState.ACTIVE: Residence.LOADED,
    ReplicaState.DRAINING: Residence.DRAINING,
    ReplicaState.PARKING: Residence.LEAVING,
    ReplicaState.PARKED: Residence.PARKED,
    ReplicaState.WAKING: Residence.WAKING,
    ReplicaState.STOPPING: Residence.LEAVING,
}
_GOING = (ReplicaState.PARKED, ReplicaState.STOPPING)
FitEngine = Callable[[EngineSettings, ModelNeeds, int], EngineSettings]  # to so many bytes of KV cache


class Seen(NamedTuple):
    """One model in one round."""

    pool: PoolObservation
    arrivals: int  # requests so far
    parkable: frozenset[str]  # replicas that can be parked


@dataclass
class _Model:
    needs: ModelNeeds
    order: ModelOrder
    state: Residence = Residence.UNLOADED
    replica: str = ""
    kv_bytes: int = 0  # of its replica
    was_parked: bool = False  # before it went
    loaded_at: float = 0.0
    used_at: float = 0.0
    arrivals: int = 0
    loads: int = 0
    unloads: int = 0
    in_flight: int = 0
    waiting: int = 0  # requests that are held for it
    lost_at: float | None = None  # its engine ended by itself then, while it was loaded; None: it did not
    aim: Aim = field(default_factory=lambda: Aim(Residence.UNLOADED))
    why: str = ""  # of its last change
    held_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.needs.fixed_bytes + self.kv_bytes


class SharedDevice:
    def __init__(
        self, name: str, rules: Rules, models: Sequence[ModelNeeds], pinned: Sequence[str], fit: FitEngine
    ) -> None:
        """`name`: of the device, for people. `pinned`: models that are, before anybody orders otherwise. `fit` makes an
        engine's settings keep to its KV cache."""
        self.name = name
        self._rules = rules
        self._fit = fit
        first = beside(rules.device_bytes, [], sorted(models, key=lambda one: one.name not in pinned))
        loaded = {model.name for model in first}
        self._models = {
            model.name: _Model(
                model,
                ModelOrder(model.name, Wish.LOAD if model.name in loaded else Wish.NONE, model.name in pinned, 0.0),
            )
            for model in models
        }

    def first_orders(self) -> list[ModelOrder]:
        """Orders before anybody gave one: the models that fit together are loaded, in the order in which they are
        named, the pinned ones before the others."""
        return [model.order for model in self._models.values()]

    def fitted(self, pool: str, engine: EngineSettings) -> EngineSettings:
        """Settings of the engine of a model whose start was decided."""
        model = self._models[pool]
        return self._fit(engine, model.needs, model.kv_bytes)

    # -- decide

    def decide(self, seen: Mapping[str, Seen], orders: Mapping[str, ModelOrder], now: float) -> dict[str, Decision]:
        for name, model in self._models.items():
            model.order = orders.get(name, model.order)
            self._observe(model, seen[name], now)
        views = {name: self._view(model, seen[name], now) for name, model in self._models.items()}
        needs = [model.needs for model in self._models.values()]
        aims = decide(self._rules, needs, views, now)
        return {name: self._decision(self._models[name], seen[name].pool, aim, now) for name, aim in aims.items()}

    def fulfilled(self) -> list[ModelOrder]:
        """Orders that are done, and so are over."""
        return [model.order for model in self._models.values() if self._is_done(model)]

    def warm_ups(self) -> list[str]:
        """Replicas that a warm-up was ordered for, and that can compute now."""
        wanted = (model for model in self._models.values() if model.order.wish == Wish.WARM_UP)
        return [model.replica for model in wanted if model.state is Residence.LOADED]

    def _is_done(self, model: _Model) -> bool:
        match model.order.wish:
            case Wish.LOAD | Wish.WARM_UP:
                return model.state is Residence.LOADED
            case Wish.PARK:
                return model.state in (Residence.PARKED, Residence.UNLOADED)
            case _:
                return False

    def _observe(self, model: _Model, seen: Seen, now: float) -> None:
        replica, before = _current(seen.pool.replicas), model.state
        demand = seen.pool.demand
        model.state = Residence.UNLOADED if replica is None else _state(replica)
        model.replica = replica.id if replica is not None else ""
        if model.state is Residence.PARKED:
            model.was_parked = True
        elif model.state is not Residence.LEAVING:
            model.was_parked = False
        if model.state is Residence.LOADED and before not in (Residence.LOADED, Residence.DRAINING):
            model.loaded_at = now
            model.loads += 1
        self._observe_loss(model, before, now)
        if model.state in (Residence.PARKED, Residence.UNLOADED) and before not in (model.state, Residence.UNLOADED):
            model.unloads += before is not Residence.PARKED
        if seen.arrivals != model.arrivals or demand.in_flight or demand.held:
            model.used_at = now
        model.arrivals = seen.arrivals
        model.in_flight = max(demand.in_flight, replica.in_flight if replica is not None else 0)
        model.waiting = demand.held
        model.held_bytes = self._held_bytes(model)

    @staticmethod
    def _observe_loss(model: _Model, before: Residence, now: float) -> None:
        """One whose engine ended by itself is loaded again, as if it had been ordered."""
        is_gone = model.state in (Residence.LEAVING, Residence.UNLOADED)
        if model.state is Residence.LOADED or model.order.wish in (Wish.UNLOAD, Wish.PARK):
            model.lost_at = None
        elif is_gone and before is Residence.LOADED and model.aim.to is Residence.LOADED:
            model.lost_at = now

    def _held_bytes(self, model: _Model) -> int:
        if model.state is Residence.UNLOADED:
            return 0
        is_parked = model.state is Residence.PARKED or (model.state is Residence.LEAVING and model.was_parked)
        return model.needs.parked_bytes if is_parked else model.total_bytes

    def _view(self, model: _Model, seen: Seen, now: float) -> ModelView:
        demand, order, replica = seen.pool.demand, model.order, _current(seen.pool.replicas)
        since = now - demand.oldest_wait_s if demand.held else None
        asked = [model.lost_at, order.at if order.wish in (Wish.LOAD, Wish.WARM_UP) else None, since]
        since = min((at for at in asked if at is not None), default=None)
        parks = replica is not None and ReplicaState.PARKED in (replica.target, replica.state)
        return ModelView(
            model.needs.name,
            model.state,
            model.held_bytes,
            model.loaded_at,
            model.used_at,
            Residence.PARKED if parks else Residence.UNLOADED,
            model.total_bytes if model.state is Residence.PARKED else 0,
            model.in_flight,
            model.waiting,
            since,
            model.replica in seen.parkable,
            max((offer.refused_until for offer in seen.pool.offers), default=now + _BLIND_S),
            Wish(order.wish),
            order.pinned,
            model.lost_at is not None,
        )

    def _decision(self, model: _Model, pool: PoolObservation, aim: Aim, now: float) -> Decision:
        model.aim = aim
        actions = tuple(self._actions(model, pool.replicas, aim))
        if actions:
            model.why = aim.reason
        if model.state is Residence.UNLOADED and actions:
            model.state, model.kv_bytes = Residence.LOADING, aim.kv_bytes
            model.held_bytes = model.total_bytes
        return Decision(
            model.needs.name,
            now,
            wanted=int(aim.to is Residence.LOADED),
            parked=int(aim.to is Residence.PARKED),
            actions=actions,
            reason=aim.reason or model.why,
            numbers={"kv_bytes": float(aim.kv_bytes)} if aim.kv_bytes else {},
        )

    def _actions(self, model: _Model, replicas: Sequence[ReplicaView], aim: Aim) -> list[Action]:
        replica = _current(replicas)
        reason = aim.reason or "nobody needs its memory"
        if replica is None:
            return [Action(ActionKind.START, reason)] if aim.to is Residence.LOADED else []
        kind: ActionKind | None = None
        to = ReplicaState.ACTIVE
        if model.state is Residence.LEAVING:
            return []
        match aim.to:
            case Residence.LOADED if replica.target is not ReplicaState.ACTIVE:
                kind = ActionKind.WAKE if replica.state is ReplicaState.PARKED else ActionKind.ACTIVATE
            case Residence.PARKED if replica.target is not ReplicaState.PARKED:
                kind, to = ActionKind.PARK, ReplicaState.PARKED
            case Residence.UNLOADED if replica.target is not ReplicaState.STOPPING:
                kind, to = ActionKind.STOP, ReplicaState.STOPPING
        return [Action(kind, reason, replica.id, to)] if kind is not None else []

    # -- what others are told

    def residency(self, pool: str) -> ModelResidency:
        model = self._models[pool]
        needs, order = model.needs, model.order
        return ModelResidency(
            state=str(model.state),
            pinned=order.pinned,
            wish=order.wish,
            reason=model.aim.reason or model.why,
            refusal=model.aim.refusal,
            wait_s=model.aim.wait_s,
            fixed_bytes=needs.fixed_bytes,
            floor_bytes=needs.floor_bytes,
            kv_bytes=model.kv_bytes if model.state not in (Residence.UNLOADED, Residence.PARKED) else 0,
            held_bytes=model.held_bytes,
            device=self.name,
            device_bytes=self._rules.device_bytes,
            loaded_at=model.loaded_at if model.state is Residence.LOADED else None,
            used_at=model.used_at or None,
            in_flight=model.in_flight,
            waiting=model.waiting,
            loads=model.loads,
            unloads=model.unloads,
            min_residence_s=self._rules.min_residence_s,
        )


def without_wish(order: ModelOrder) -> ModelOrder:
    return ModelOrder(order.model, Wish.NONE, order.pinned, order.at, order.by)


def fit_cpu(engine: EngineSettings, needs: ModelNeeds, kv_bytes: int) -> EngineSettings:
    return dataclasses.replace(engine, kv_gib=kv_bytes / (1 << 30)) if kv_bytes else engine


def fit_gpu(gpu_bytes: int, engine: EngineSettings, needs: ModelNeeds, kv_bytes: int) -> EngineSettings:
    """Returns settings with a share of the GPU for all that the engine puts there, so that it stays within it whatever
    its weights and steps really take."""
    share = min(1.0, (needs.fixed_bytes + kv_bytes) / gpu_bytes)
    return dataclasses.replace(engine, memory_fraction=share, parkable=True)


def _current(replicas: Sequence[ReplicaView]) -> ReplicaView | None:
    """The replica that counts: one that goes is gone only when there is no row of it any more."""
    staying = (one for one in replicas if one.state is not ReplicaState.STOPPING)
    return next(itertools.chain(staying, replicas), None)


def _state(replica: ReplicaView) -> Residence:
    state, target = replica.state, replica.target
    match state:
        case ReplicaState.STARTING if target is ReplicaState.STOPPING:
            return Residence.LEAVING
        case ReplicaState.STANDBY if target in _GOING:
            return Residence.LEAVING
        case ReplicaState.STANDBY if target is ReplicaState.STANDBY:  # its engine cannot be parked
            return Residence.LOADED
        case ReplicaState.ACTIVE if target in _GOING:
            return Residence.DRAINING
        case ReplicaState.DRAINING if target is ReplicaState.ACTIVE:
            return Residence.LOADED
        case ReplicaState.PARKED if target is ReplicaState.ACTIVE:
            return Residence.WAKING
        case ReplicaState.PARKED if target is ReplicaState.STOPPING:
            return Residence.LEAVING
    return _STATES[state]
