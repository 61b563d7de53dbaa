"""All that is known of one replica's health, as one state, one share and one flag on its snapshot.

Three probes that fail in a row take it out and two that pass bring it back, with a slow start. Told that it is draining
it is left alone; hung, it comes back by a deep probe only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.core.replica import GONE_AFTER_S, STALE_AFTER_S, ReplicaSnapshot, ReplicaState
from penstock.gateway.health.breaker import BreakerSettings, BreakerState, CircuitBreaker
from penstock.gateway.health.slow_start import SlowStart, SlowStartSettings
from penstock.gateway.health.watchdog import HUNG_AFTER_S, Watchdog


@dataclass(frozen=True)
class HealthSettings:
    out_after: int = 3  # failed probes in a row
    back_after: int = 2  # passed probes in a row; a replica that was never in needs one
    stale_after_s: float = STALE_AFTER_S
    gone_after_s: float = GONE_AFTER_S
    hung_after_s: float = HUNG_AFTER_S
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    slow_start: SlowStartSettings = field(default_factory=SlowStartSettings)


class ReplicaHealth:
    def __init__(self, settings: HealthSettings | None = None, *, is_known: bool = False) -> None:
        """`is_known`: it was in use before this gateway was; it is not cold, though it has to pass a probe."""
        self._settings = settings or HealthSettings()
        self.breaker = CircuitBreaker(self._settings.breaker)
        self.watchdog = Watchdog(self._settings.hung_after_s)
        self._slow_start = SlowStart(self._settings.slow_start)
        self._is_in = False
        self._is_draining = False
        self._is_cold = not is_known
        self._passed = self._settings.back_after - 1  # a replica that was never in needs one
        self._failed = 0

    @property
    def needs_deep_probe(self) -> bool:
        return self.watchdog.is_hung

    def probe_passed(self, now: float) -> None:
        self._failed = 0
        self._is_draining = False
        if self._is_in:
            return
        self._passed += 1
        if self._passed >= self._settings.back_after:
            self._is_in = True
            self._warm_up(now)

    def probe_failed(self, now: float) -> None:
        self._passed = 0
        self._failed += 1
        if self._failed >= self._settings.out_after:
            self._is_in = False
            self._is_cold = True

    def draining(self) -> None:
        """It said so: alive, and taking nothing new. What runs there goes on."""
        self._failed = 0
        self._is_draining = True

    def deep_probe_passed(self, now: float) -> None:
        if self.watchdog.is_hung:
            self._is_cold = True
            self.watchdog.deep_probe_passed(now)
            self._warm_up(now)

    def state(self, taken_at: float, now: float) -> ReplicaState:
        age_s = now - taken_at
        if not self._is_in or self.watchdog.is_hung or age_s > self._settings.gone_after_s:
            return ReplicaState.OUT
        if self._is_draining:
            return ReplicaState.DRAINING
        if age_s > self._settings.stale_after_s or self.breaker.state(now) is not BreakerState.CLOSED:
            return ReplicaState.DEGRADED
        return ReplicaState.READY

    def share(self, now: float) -> float:
        return self._slow_start.share(now)

    def mark(self, snapshot: ReplicaSnapshot, now: float) -> ReplicaSnapshot:
        """The snapshot with what this gateway thinks of the replica."""
        state, share, is_tripped = self.state(snapshot.taken_at, now), self.share(now), self.breaker.is_tripped(now)
        return replace(snapshot, state=state, share=share, is_tripped=is_tripped)

    def _warm_up(self, now: float) -> None:
        if self._is_cold:
            self._is_cold = False
            self._slow_start.begin(now)
