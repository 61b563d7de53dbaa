"""A planner like Dynamo's. Slow loop, every adjustment interval: the next interval's rate is forecast from the last
ones (level and trend), and the profile says how many replicas keep the SLO at it: a floor. Fast loop, every 5 s: one
replica more while a new request would wait too long, and none while a start is under way; one less when the rest would
be used to less than 80 %.
"""

from __future__ import annotations

import math

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import PoolObservation, ReplicaState
from penstock.fleet.policy.profile import CapacityProfile, Mix
from penstock.sim.fleet.policy import Baseline

_INTERVAL_S = 180.0
_FAST_S = 5.0
_SPARE = 0.8
_LEVEL, _TREND = 0.6, 0.3  # of Holt's smoothing


class Planner(Baseline):
    name = "planner"

    def __init__(self, profile: CapacityProfile, slo: Slo, *, least: int, most: int) -> None:
        self._profile, self._slo = profile, slo
        self._least, self._most = least, most
        self._level: float | None = None
        self._trend = 0.0
        self._sum, self._count = 0.0, 0
        self._slow_at = self._fast_at = -math.inf
        self._floor = least
        self._wanted: int | None = None

    def wanted(self, observation: PoolObservation, num_live: int, now: float) -> int:
        demand = observation.demand
        if self._wanted is None:
            self._wanted = self._floor = num_live
            self._slow_at = self._fast_at = now
        self._sum, self._count = self._sum + demand.arrivals_per_s, self._count + 1
        mix = Mix(max(1.0, demand.prompt_tokens), max(1.0, demand.output_tokens), demand.cached_share)
        if now - self._slow_at >= _INTERVAL_S:
            self._slow_at = now
            self._floor = self._needed(self._forecast(self._sum / self._count), mix)
            self._sum, self._count = 0.0, 0
            self._wanted = max(self._floor, self._wanted)
        if now - self._fast_at >= _FAST_S and num_live == observation.count(ReplicaState.ACTIVE):
            self._fast_at = now
            speed = self._profile.max_rate(mix, self._slo) * max(1, num_live)
            if demand.waiting / speed > self._slo.ttft_s:
                self._wanted = max(self._wanted, num_live + 1)
            elif self._wanted > self._floor and demand.arrivals_per_s < _SPARE * speed * (num_live - 1) / num_live:
                self._wanted -= 1
        self._wanted = min(self._most, max(self._floor, self._wanted))
        return self._wanted

    def _forecast(self, rate: float) -> float:
        if self._level is None:
            self._level = rate
        expected = self._level + self._trend
        level = expected + _LEVEL * (rate - expected)
        self._trend += _TREND * (level - self._level - self._trend)
        self._level = level
        return max(0.0, self._level + self._trend)

    def _needed(self, rate: float, mix: Mix) -> int:
        return min(self._most, max(self._least, math.ceil(rate / self._profile.max_rate(mix, self._slo))))
