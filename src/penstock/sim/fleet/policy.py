"""Policies that scale a simulated fleet: the controller's with its forecast, or another of the same kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from penstock.capacity.steady import Limits
from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.forecast import Forecaster
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import ForecastBand, PoolObservation, ReplicaState, ReplicaView
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile, ReplicaCosts
from penstock.fleet.settings import PoolSettings
from penstock.sim.profile import Profile

POOL = "pool"
_FORECAST_S = 10.0  # between two forecasts: they tell minutes apart


class Autoscaler(Protocol):
    """One pool's policy, asked once a second."""

    name: str

    def observe(self, now: float, arrivals_per_s: float) -> tuple[ForecastBand, ...]:
        """The last second's arrivals; returns what it forecasts, if it does."""

    def decide(self, observation: PoolObservation, now: float) -> Decision:
        """The next actions."""


class Ours:
    """The fleet controller's own policy and forecast."""

    name = "ours"

    def __init__(self, settings: PoolSettings, slo: Slo, profile: CapacityProfile) -> None:
        self._policy = PoolPolicy(settings, slo, profile)
        self._forecaster = Forecaster(timezone=settings.timezone)
        self._is_predicting = settings.predict
        self._memory = PolicyMemory()
        self._bands: tuple[ForecastBand, ...] = ()
        self._horizons: tuple[float, ...] = ()
        self._next = 0.0

    def observe(self, now: float, arrivals_per_s: float) -> tuple[ForecastBand, ...]:
        self._forecaster.observe(now, arrivals_per_s)
        if self._is_predicting and now >= self._next and self._horizons:
            self._next = now + _FORECAST_S
            self._bands = self._forecaster.bands(now, self._horizons)
        return self._bands

    def decide(self, observation: PoolObservation, now: float) -> Decision:
        if not self._horizons:
            self._horizons = self._policy.horizons(observation.durations)
        decision, self._memory = self._policy.decide(observation, self._memory, now)
        return decision


class Baseline(ABC):
    """A policy that counts replicas and knows no state between on and off."""

    name = ""

    def observe(self, now: float, arrivals_per_s: float) -> tuple[ForecastBand, ...]:
        return ()

    def decide(self, observation: PoolObservation, now: float) -> Decision:
        live = [each for each in observation.replicas if each.target is not ReplicaState.STOPPING]
        wanted = self.wanted(observation, len(live), now)
        return Decision(observation.pool, now, wanted, actions=resize(live, wanted, self.name))

    @abstractmethod
    def wanted(self, observation: PoolObservation, num_live: int, now: float) -> int:
        """Replicas that there should be."""


def resize(live: list[ReplicaView], wanted: int, reason: str) -> tuple[Action, ...]:
    """Starts what is missing; stops what is too much, those first that are still starting, then the youngest."""
    if wanted >= len(live):
        return (Action(ActionKind.START, reason),) * (wanted - len(live))
    order = sorted(live, key=lambda each: (each.state is not ReplicaState.STARTING, -each.started_at))
    return tuple(Action(ActionKind.STOP, reason, each.id) for each in order[: len(live) - wanted])


def capacity_profile(profile: Profile) -> CapacityProfile:
    """The simulator's profile of a replica, as the policy plans with it."""
    limits = Limits(profile.kv_tokens, profile.max_sequences, profile.chunk_tokens)
    return CapacityProfile(ReplicaCosts.from_step_cost(profile.cost.times, limits))
