"""The rules of the Kubernetes horizontal pod autoscaler, on requests in flight per replica; and KEDA's, on those that
wait, which hands its metric to the same autoscaler.

Every sync (15 s) the recommendation is metric / target, unless it is within a tenth of what there is. Up: at once, by
four pods or to twice as many every 15 s, whichever is more. Down: to the highest recommendation of the last 300 s.
"""

from __future__ import annotations

import math
from collections import deque

from penstock.fleet.policy.observation import Demand, PoolObservation
from penstock.sim.fleet.policy import Baseline

_TOLERANCE = 0.1
_SYNC_S = 15.0
_STABILISATION_S = 300.0


class Hpa(Baseline):
    name = "hpa"

    def __init__(self, target: float, *, least: int, most: int, sync_s: float = _SYNC_S) -> None:
        self._target = target
        self._least, self._most = least, most
        self._sync_s = sync_s
        self._next = -math.inf
        self._wanted: int | None = None
        self._recommended: deque[tuple[float, int]] = deque()

    def wanted(self, observation: PoolObservation, num_live: int, now: float) -> int:
        if self._wanted is None:
            self._wanted = num_live
        if now < self._next:
            return self._wanted
        self._next = now + self._sync_s
        before = self._wanted
        needed = self._metric(observation.demand) / self._target
        steady = before and abs(needed / before - 1) <= _TOLERANCE
        recommended = min(self._most, max(self._least, before if steady else math.ceil(needed)))
        self._recommended.append((now, recommended))
        while self._recommended[0][0] < now - _STABILISATION_S:
            self._recommended.popleft()
        if recommended > before:
            self._wanted = min(recommended, max(before + 4, 2 * before))
        else:
            self._wanted = min(before, max(each for _, each in self._recommended))
        return self._wanted

    def _metric(self, demand: Demand) -> float:
        return demand.in_flight


class Keda(Hpa):
    """A scaled object on requests that wait, above 5 of them for each replica, asked for every 30 s."""

    name = "keda"

    def __init__(self, *, least: int, most: int, threshold: float = 5.0, polling_s: float = 30.0) -> None:
        super().__init__(threshold, least=least, most=most, sync_s=polling_s)

    def _metric(self, demand: Demand) -> float:
        return demand.waiting
