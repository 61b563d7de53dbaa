"""Replicas of a simulated pool by state. Each change of state takes its time; draining, as long as streams last."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.fleet.policy.decision import Action, ActionKind
from penstock.fleet.policy.observation import CapacityType, Durations, Offer, ReplicaState, ReplicaView

S = ReplicaState
_STOP_S = 1.0  # of a process that has nothing to do any more


@dataclass(slots=True)
class PoolReplica:
    id: str
    state: ReplicaState
    since: float
    target: ReplicaState
    started_at: float
    zone: str = ""
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    until: float = math.inf  # when it leaves its state

    def move(self, state: ReplicaState, now: float, takes_s: float = math.inf) -> None:
        self.state, self.since, self.until = state, now, now + takes_s


class PoolReplicas:
    """`activated` and `drains` are told of replicas that begin to take requests and that end to; `drains` says how many
    seconds the streams of one will last, or infinity: `drained` is called then. Those that there are at the beginning
    are on demand, spread over the zones of `offers`."""

    def __init__(
        self,
        durations: Durations,
        num_active: int,
        *,
        now: float = 0.0,
        offers: Sequence[Offer] = (Offer(),),
        activated: Callable[[str], None] | None = None,
        drains: Callable[[str], float] | None = None,
        gone: Callable[[str], None] | None = None,
    ) -> None:
        self.durations = durations
        self.counts: dict[ReplicaState, int] = dict.fromkeys(ReplicaState, 0)
        self._prices = {(each.zone, each.capacity_type): each.price_per_hour for each in offers}
        self.num_spot = 0  # that occupy a device
        self._activated, self._drains, self._gone = activated, drains, gone
        self._replicas: dict[str, PoolReplica] = {}
        self._number = 0
        self._next = math.inf
        self.views: tuple[ReplicaView, ...] = ()
        self.states: list[tuple[ReplicaState, int]] = []  # that have any, with how many
        zones = [each.zone for each in offers if each.capacity_type is CapacityType.ON_DEMAND]
        for number in range(num_active):
            self._move(self._new(now, S.ACTIVE, zones[number % len(zones)]), S.ACTIVE, now)
        self._changed()

    def advance(self, now: float) -> None:
        """Changes of state that are over by now."""
        if now < self._next:
            return
        while due := [each for each in self._replicas.values() if each.until <= now]:
            for replica in due:
                self._leave_state(replica, replica.until)
        self._changed()

    def act(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            if action.kind is ActionKind.START:
                replica = self._new(now, action.to, action.zone, action.capacity_type)
                self._move(replica, S.STARTING, now, self.durations.start_s)
            elif (known := self._replicas.get(action.replica)) is not None:
                self._act_on(known, action, now)
        self._changed()

    def drained(self, replica_id: str, now: float) -> None:
        replica = self._replicas[replica_id]
        if replica.state is S.DRAINING:
            self._leave_state(replica, now)
            self._changed()

    def _new(
        self, now: float, target: ReplicaState, zone: str, capacity_type: CapacityType = CapacityType.ON_DEMAND
    ) -> PoolReplica:
        self._number += 1
        replica = PoolReplica(f"r{self._number}", S.STARTING, now, target, now, zone, capacity_type)
        self._replicas[replica.id] = replica
        self.counts[S.STARTING] += 1
        return replica

    def _act_on(self, replica: PoolReplica, action: Action, now: float) -> None:
        kind, state = action.kind, replica.state
        if kind is ActionKind.WAKE and state is S.PARKED:
            replica.target = action.to
            self._move(replica, S.WAKING, now, self.durations.wake_s)
        elif kind is ActionKind.ACTIVATE:
            replica.target = S.ACTIVE
            if state is S.STANDBY:
                replica.until = now + self.durations.activate_s
            elif state is S.DRAINING:
                self._move(replica, S.ACTIVE, now)
        elif kind in (ActionKind.DEACTIVATE, ActionKind.PARK, ActionKind.STOP):
            replica.target = {ActionKind.DEACTIVATE: S.STANDBY, ActionKind.PARK: S.PARKED}.get(kind, S.STOPPING)
            if state is S.ACTIVE:
                self._move(replica, S.DRAINING, now, self._drains(replica.id) if self._drains else 0.0)
                if action.grace_s is not None:
                    replica.until = min(replica.until, now + action.grace_s)
            elif state in (S.STANDBY, S.PARKED) or (state is S.STARTING and replica.target is S.STOPPING):
                self._leave_state(replica, now)

    def _leave_state(self, replica: PoolReplica, now: float) -> None:
        """Moves a replica to its target, or to what lies between."""
        state, target = replica.state, replica.target
        if state is S.STOPPING:
            self._remove(replica)
        elif target is S.STOPPING:
            self._move(replica, S.STOPPING, now, _STOP_S)
        elif state is S.PARKING or (state in (S.STARTING, S.WAKING) and target is S.STANDBY):
            self._move(replica, target, now)
        elif target is S.PARKED:
            self._move(replica, S.PARKING, now, self.durations.park_s)
        elif state in (S.STARTING, S.WAKING):
            self._move(replica, S.STANDBY, now, self.durations.activate_s)
        else:
            self._move(replica, target, now)

    def _move(self, replica: PoolReplica, state: ReplicaState, now: float, takes_s: float = math.inf) -> None:
        self.counts[replica.state] -= 1
        self.counts[state] += 1
        replica.move(state, now, takes_s)
        if state is S.ACTIVE and self._activated is not None:
            self._activated(replica.id)

    def _remove(self, replica: PoolReplica) -> None:
        self.counts[replica.state] -= 1
        del self._replicas[replica.id]
        if self._gone is not None:
            self._gone(replica.id)

    def _changed(self) -> None:
        self._next = min((replica.until for replica in self._replicas.values()), default=math.inf)
        self.states = [(state, count) for state, count in self.counts.items() if count]
        self.num_spot = sum(
            each.capacity_type is CapacityType.SPOT and each.state is not S.PARKED for each in self._replicas.values()
        )
        self.views = tuple(
            ReplicaView(
                each.id,
                each.state,
                each.since,
                each.target,
                each.zone,
                each.capacity_type,
                self._prices.get((each.zone, each.capacity_type), 0.0),
                each.started_at,
            )
            for each in self._replicas.values()
        )
