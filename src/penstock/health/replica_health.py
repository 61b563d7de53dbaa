"""The health of one replica to this gateway, as one state, one share and one flag on its snapshot.

Three probes that fail in a row take it out and two that pass bring it back. One that hangs is out at once, and comes
back by the same two, which are deep ones then; one that may be about to hang is degraded. A replica that comes back, or
comes late, starts slowly: its cache is cold, and what took it out may do so again.
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.core.measurements import EngineMeasurements
from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.health.breaker import CircuitBreaker
from penstock.health.settings import HealthSettings
from penstock.health.slow_start import SlowStart
from penstock.health.watchdog import Watchdog

_SUSPECT = 0.25  # of the time after which it hangs: new work goes elsewhere if it can


class ReplicaHealth:
    def __init__(self, settings: HealthSettings | None = None) -> None:
        self.settings = settings or HealthSettings()
        self.breaker = CircuitBreaker(self.settings.breaker)
        self.is_in = True
        self.penalty = 1.0  # the factor on its share: the watch's verdict on one that is slow, or wrong
        self._is_suspect = False
        self._watchdog = Watchdog(self.settings.hung_after_s)
        self._slow_start = SlowStart(self.settings.slow_start)
        self._is_asked = True  # or what it says of itself is enough
        self._passed = 0
        self._failed = 0
        self._last: ReplicaState | None = None  # None: nothing is known yet, so it may have been in use for long

    def is_warming_up(self, now: float) -> bool:
        """Whether it has come or come back just now, and so starts slowly."""
        return self._slow_start.share(now) < 1.0

    def await_probe(self) -> None:
        """It says nothing of itself: out until it was asked once."""
        self.is_in = self._is_asked = False
        self._passed = self.settings.back_after - 1

    def probed(self, is_well: bool) -> None:
        self._is_asked = True
        self._passed, self._failed = (self._passed + 1, 0) if is_well else (0, self._failed + 1)
        if self._failed >= self.settings.out_after:
            self.is_in = False
        elif self._passed >= self.settings.back_after:
            self.is_in = True

    def trust(self) -> None:
        """Somebody else has seen that it works: in until probes say otherwise."""
        self.is_in = self._is_asked = True
        self._failed = 0

    def start_over(self) -> None:
        """Nobody listened to it for a while: how long it may stand still is counted anew."""
        self._watchdog.start_over()

    def hangs(self, measured: EngineMeasurements, now: float) -> bool:
        """Whether this report is the one too many. From then on it is out until probes bring it back."""
        if not self.is_in:
            return False
        stalled = self._watchdog.stalled(
            sequences=measured.load.num_running + measured.load.num_queued,
            steps=measured.load.steps,
            step_s=_longest_step_s(measured),
            now=now,
        )
        self._is_suspect = _SUSPECT <= stalled < 1.0
        if stalled < 1.0:
            return False
        self.is_in, self._passed = False, 0
        self._watchdog = Watchdog(self.settings.hung_after_s)
        return True

    def mark(self, said: ReplicaSnapshot, now: float) -> ReplicaSnapshot:
        """Returns what the replica said, with what is thought of it."""
        state = said.state if self.is_in else ReplicaState.OUT
        if state is ReplicaState.READY and self._is_suspect:
            state = ReplicaState.DEGRADED
        if state is ReplicaState.READY and self._last is ReplicaState.OUT:
            self._slow_start.begin(now)
        if self._is_asked:
            self._last = state
        return replace(
            said, state=state, share=self.penalty * self._slow_start.share(now), is_tripped=self.breaker.is_tripped(now)
        )


def _longest_step_s(measured: EngineMeasurements) -> float | None:
    speeds = measured.speeds
    if not speeds.prefill_tokens_per_s:
        return None
    return measured.limits.chunk_tokens / speeds.prefill_tokens_per_s + (speeds.decode_step_s or 0.0)
