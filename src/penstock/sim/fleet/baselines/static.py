"""A baseline with as many replicas as the busiest minute needs, all the time."""

from __future__ import annotations

from penstock.fleet.policy.observation import PoolObservation
from penstock.sim.fleet.policy import Baseline


class StaticPeak(Baseline):
    name = "static"

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def wanted(self, observation: PoolObservation, num_live: int, now: float) -> int:
        return self._num_replicas
