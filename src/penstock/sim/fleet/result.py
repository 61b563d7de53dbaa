"""Results of a policy under a demand: requests within the SLO, replica-hours by state, decisions, cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import PoolObservation, ReplicaState

TAKEN_BACK_S = 300.0
_POINTS = 600  # of a timeline
_DOWN = (ActionKind.DEACTIVATE, ActionKind.PARK, ActionKind.STOP)


class Point(Struct, frozen=True):
    """Means over some seconds of a run, for a plot."""

    at_s: float
    arrivals_per_s: float
    in_slo: float  # share
    states: dict[str, float]
    forecast_p50: float | None = None
    forecast_p90: float | None = None


class FleetResult(Struct, frozen=True):
    """Shares are between 0 and 1. `replica_hours`: of every state that occupies a device."""

    policy: str
    curve: str
    seconds: int
    requests: float
    in_slo: float
    shed: float  # share
    replica_hours: float
    parked_hours: float
    hours: dict[str, float]  # by state
    cost: float
    decisions: int  # that made the pool larger or smaller
    taken_back: float  # share of them, by one in the other direction within five minutes
    broken_s: int  # seconds in which fewer requests than the SLO's quantile kept it; of a surge: from its begin on
    most_active: int
    cpu_s: float = 0.0
    spot_hours: float = 0.0  # of `replica_hours`
    device_hours: float = 0.0  # `replica_hours`, of all devices of each
    over_oracle: float | None = None  # replica-hours as a multiple of the oracle's
    timeline: list[Point] = []


class Prices(Struct, frozen=True):
    """Prices of a replica-hour."""

    occupied: float = 4.0
    parked: float = 0.4
    spot: float = 0.0


class FleetTally:
    def __init__(self, seconds: int, quantile: float, *, broken_from: int = 0) -> None:
        self._every = max(1, math.ceil(seconds / _POINTS))
        self._quantile, self._broken_from = quantile, broken_from
        self._seconds = 0
        self._requests = self._kept = self._shed = self._spot_s = 0.0
        self._state_s: dict[ReplicaState, float] = dict.fromkeys(ReplicaState, 0.0)
        self._most_active = self._broken = 0
        self._timeline: list[Point] = []
        self._since: tuple[float, float, dict[ReplicaState, float]] = (0.0, 0.0, dict(self._state_s))
        self._changes: list[tuple[float, int]] = []

    def second(
        self,
        arrivals: float,
        kept: float,
        shed: float,
        states: Sequence[tuple[ReplicaState, int]],
        forecast: tuple[float, float] | None,
        num_spot: int = 0,
    ) -> None:
        self._seconds += 1
        self._spot_s += num_spot
        self._requests += arrivals
        self._kept += kept
        self._shed += shed
        for state, count in states:
            self._state_s[state] += count
            if state is ReplicaState.ACTIVE and count > self._most_active:
                self._most_active = count
        if arrivals and kept < self._quantile * arrivals and self._seconds > self._broken_from:
            self._broken += 1
        if self._seconds % self._every == 0:
            self._add_point(states, forecast)

    def _add_point(self, states: Sequence[tuple[ReplicaState, int]], forecast: tuple[float, float] | None) -> None:
        requests, kept, state_s = self._since
        came = self._requests - requests
        means = {s.value: (t - state_s[s]) / self._every for s, t in self._state_s.items() if t > state_s[s]}
        share = (self._kept - kept) / came if came else 1.0
        self._timeline.append(Point(float(self._seconds), came / self._every, share, means, *(forecast or ())))
        self._since = self._requests, self._kept, dict(self._state_s)

    def decided(self, decision: Decision, observation: PoolObservation) -> None:
        change = active_change(decision.actions, observation)
        if change:
            self._changes.append((decision.at, change))

    def result(self, policy: str, curve: str, prices: Prices, cpu_s: float) -> FleetResult:
        hours = {state: seconds / 3600 for state, seconds in self._state_s.items()}
        parked = hours[ReplicaState.PARKED]
        occupied, spot = sum(hours.values()) - parked, self._spot_s / 3600
        return FleetResult(
            policy=policy,
            curve=curve,
            seconds=self._seconds,
            requests=self._requests,
            in_slo=self._kept / self._requests if self._requests else 1.0,
            shed=self._shed / self._requests if self._requests else 0.0,
            replica_hours=occupied,
            parked_hours=parked,
            hours={state.value: each for state, each in hours.items() if each},
            cost=(occupied - spot) * prices.occupied + spot * prices.spot + parked * prices.parked,
            decisions=len(self._changes),
            taken_back=share_taken_back(self._changes),
            broken_s=self._broken,
            most_active=self._most_active,
            cpu_s=cpu_s,
            spot_hours=spot,
            timeline=self._timeline,
        )


def active_change(actions: Sequence[Action], observation: PoolObservation) -> int:
    """Returns by how many replicas that are active, or on their way to it, a decision changes the pool."""
    targets: Mapping[str, ReplicaState] = {each.id: each.target for each in observation.replicas}
    change = 0
    for action in actions:
        is_bound = targets.get(action.replica) is ReplicaState.ACTIVE
        if action.kind in _DOWN:
            change -= is_bound
        elif action.to is ReplicaState.ACTIVE:
            change += not is_bound
    return change


def share_taken_back(changes: Sequence[tuple[float, int]]) -> float:
    """Share of changes after which the next one in the other direction came within five minutes."""
    taken = 0
    next_up = next_down = math.inf
    for at, change in reversed(changes):
        opposite = next_down if change > 0 else next_up
        taken += opposite - at <= TAKEN_BACK_S
        if change > 0:
            next_up = at
        else:
            next_down = at
    return taken / len(changes) if changes else 0.0
