"""Replicas of a pool by what they are to the policy: capacity, on their way to it, in reserve, or going."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.fleet.policy.observation import ReplicaState, ReplicaView

_ON_THEIR_WAY = frozenset({ReplicaState.STARTING, ReplicaState.WAKING})
_ON_THEIR_WAY_DOWN = frozenset({ReplicaState.PARKED, ReplicaState.STOPPING})


class Census:
    __slots__ = (
        "active",
        "coming",
        "doomed",
        "num_draining",
        "parked",
        "standby",
        "staying",
        "to_parked",
        "to_standby",
    )

    def __init__(self, replicas: Sequence[ReplicaView]) -> None:
        self.active: list[ReplicaView] = []
        self.coming: list[ReplicaView] = []  # start or wake, to become active
        self.standby: list[ReplicaView] = []
        self.parked: list[ReplicaView] = []
        self.to_standby = self.to_parked = 0  # on their way there
        self.doomed: list[ReplicaView] = []  # interruption notices, not drained yet
        self.num_draining = 0
        self.staying: list[ReplicaView] = []  # all that are not going: what counts for `max`, zones and spot share
        for replica in replicas:
            state, target = replica.state, replica.target
            if state is ReplicaState.ACTIVE:
                place = self.active
            elif state in _ON_THEIR_WAY and target is ReplicaState.ACTIVE:
                place = self.coming
            elif state is ReplicaState.STANDBY and target not in _ON_THEIR_WAY_DOWN:
                place = self.standby
            elif state is ReplicaState.PARKED:
                place = self.parked
            else:
                self._count_moving(replica)
                continue
            if replica.deadline is not None:
                self.doomed.append(replica)
                continue
            place.append(replica)
            self.staying.append(replica)

    def _count_moving(self, replica: ReplicaView) -> None:
        state, target = replica.state, replica.target
        self.num_draining += state is ReplicaState.DRAINING
        if state is ReplicaState.STOPPING or target is ReplicaState.STOPPING:
            return
        if replica.deadline is not None:
            if state in _ON_THEIR_WAY:
                self.doomed.append(replica)
            return
        if target is ReplicaState.STANDBY:
            self.to_standby += 1
        elif target is ReplicaState.PARKED or state is ReplicaState.PARKING:
            self.to_parked += 1
        else:
            return  # drained by an operator, to come back: neither capacity nor reserve
        self.staying.append(replica)

    @property
    def num_ready(self) -> int:
        """Capacity that is there or comes without another action."""
        return len(self.active) + len(self.coming)

    @property
    def reserve(self) -> int:
        """Replicas that become active much faster than a start."""
        return len(self.standby) + len(self.parked) + self.to_standby + self.to_parked
