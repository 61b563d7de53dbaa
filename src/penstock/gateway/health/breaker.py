"""A circuit breaker for one replica, fed by the outcomes of real requests; a timeout is a failure like any other.

Closed: everything goes through, until too many in a row, or too large a part of a window, fail. Open: nothing goes
through for a while. Half-open: a few trials at a time; enough successes close it, one failure opens it for longer.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

_BUCKET_S = 5.0


@dataclass(frozen=True)
class BreakerSettings:
    failures_in_a_row: int = 10
    failure_rate: float = 0.5  # of the requests that ended in the window
    window_s: float = 60.0
    least_requests: int = 5  # below which a rate says nothing
    open_s: float = 5.0  # doubled each time a trial fails
    most_open_s: float = 60.0
    trials: int = 3  # at a time, half-open
    successes_to_close: int = 3


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True, eq=False)
class Attempt:
    """One request that went through. It must end once: a trial that nobody ends keeps its place."""

    breaker: CircuitBreaker
    epoch: int
    is_over: bool = False

    def succeeded(self, now: float) -> None:
        self._end(True, now)

    def failed(self, now: float) -> None:
        self._end(False, now)

    def abandoned(self, now: float) -> None:
        """It says nothing about the replica: the client went away, or its request was wrong."""
        self._end(None, now)

    def _end(self, is_success: bool | None, now: float) -> None:
        if not self.is_over:
            self.is_over = True
            self.breaker.ended(self.epoch, is_success, now)


@dataclass(slots=True)
class _Bucket:
    at: float
    ended: int = 0
    failed: int = 0


class CircuitBreaker:
    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._is_closed = True
        self._epoch = 0  # of the state: what began in an earlier one tells nothing about this one
        self._window: deque[_Bucket] = deque()
        self._in_a_row = 0
        self._opens_at = 0.0  # when it is half-open
        self._open_s = self._settings.open_s
        self._trials = 0
        self._successes = 0

    def state(self, now: float) -> BreakerState:
        if self._is_closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._opens_at else BreakerState.OPEN

    def is_tripped(self, now: float) -> bool:
        """Does it let nothing through now?"""
        if self._is_closed:
            return False
        return now < self._opens_at or self._trials >= self._settings.trials

    def begin(self, now: float) -> Attempt | None:
        """Let one request through, or not."""
        if self.is_tripped(now):
            return None
        if not self._is_closed:
            self._trials += 1
        return Attempt(self, self._epoch)

    def ended(self, epoch: int, is_success: bool | None, now: float) -> None:
        if epoch != self._epoch:
            return
        if self._is_closed:
            if is_success is not None:
                self._count(is_success, now)
            return
        self._trials -= 1
        if is_success is False:
            self._trip(now, min(self._settings.most_open_s, self._open_s * 2))
        elif is_success:
            self._successes += 1
            if self._successes >= self._settings.successes_to_close:
                self._close()

    def _count(self, is_success: bool, now: float) -> None:
        settings, window = self._settings, self._window
        if not window or now - window[-1].at >= _BUCKET_S:
            window.append(_Bucket(now))
        while now - window[0].at >= settings.window_s:
            window.popleft()
        window[-1].ended += 1
        window[-1].failed += not is_success
        self._in_a_row = 0 if is_success else self._in_a_row + 1
        if is_success:
            return
        ended, failed = sum(bucket.ended for bucket in window), sum(bucket.failed for bucket in window)
        is_rate_high = ended >= settings.least_requests and failed > settings.failure_rate * ended
        if is_rate_high or self._in_a_row >= settings.failures_in_a_row:
            self._trip(now, settings.open_s)

    def _trip(self, now: float, open_s: float) -> None:
        self._is_closed = False
        self._open_s = open_s
        self._opens_at = now + open_s
        self._begin_epoch()

    def _close(self) -> None:
        self._is_closed = True
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._window.clear()
        self._in_a_row = self._trials = self._successes = 0
