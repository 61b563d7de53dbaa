"""A circuit breaker for one replica, fed by the outcomes of real requests; a timeout is a failure like any other.

Closed: everything goes through, until too many in a row, or too large a part of a window, fail. Open: nothing goes
through for a while. Half-open: a few trials at a time; enough successes close it, one failure opens it for longer.

**Whose fault it is.** A connection that fails and an answer that does not come are the replica's. An error that it
answers with may be the request's: such failures count only as far as others fail there too. Of the source (a tenant)
with the most of them no more count than of all others together, so one tenant alone never opens a breaker, with
whatever it sends. Only if the same request did well elsewhere, and nobody else's has done well here within the window,
does the failure count without others.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

_BUCKET_S = 5.0
_MAX_FAILURES = 512  # that are remembered of a window


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


class Attempt(msgspec.Struct, eq=False):
    """One request that went through. It must end once: a trial that nobody ends keeps its place."""

    breaker: CircuitBreaker
    epoch: int
    source: str = ""  # the tenant whose request it is
    is_over: bool = False

    def succeeded(self, now: float) -> None:
        self._end(True, now)

    def failed(self, now: float) -> None:
        """The failure is the replica's fault, whatever was asked."""
        self._end(False, now)

    def doubted(self, now: float) -> None:
        """It failed, perhaps by what was asked."""
        self._end(False, now, self.source)

    def proved(self, now: float) -> None:
        """The request of one that was `doubted` did well elsewhere."""
        self.breaker.proved(self.epoch, self.source, now)

    def abandoned(self, now: float) -> None:
        """It says nothing about the replica: the client went away, or its request was wrong."""
        self._end(None, now)

    def _end(self, is_success: bool | None, now: float, doubtful_source: str | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            self.breaker.ended(self.epoch, self.source, is_success, now, doubtful_source)


@dataclass(slots=True)
class _Bucket:
    at: float
    succeeded: int = 0


class CircuitBreaker:
    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self.is_closed = True
        self._epoch = 0  # of the state: what began in an earlier one tells nothing about this one
        self._window: deque[_Bucket] = deque()
        self._failures: deque[tuple[float, str | None]] = deque(maxlen=_MAX_FAILURES)  # in it; None: for certain
        self._row: deque[str | None] = deque(maxlen=_MAX_FAILURES)  # those since the last success
        self._well = self._well_before = ("", -float("inf"))  # the last two sources that did well, and when
        self._opens_at = 0.0  # when it is half-open
        self._open_s = self._settings.open_s
        self._trials = 0
        self._successes = 0

    def state(self, now: float) -> BreakerState:
        if self.is_closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._opens_at else BreakerState.OPEN

    def is_tripped(self, now: float) -> bool:
        """Whether it lets nothing through now."""
        if self.is_closed:
            return False
        return now < self._opens_at or self._trials >= self._settings.trials

    def begin(self, now: float, source: str = "") -> Attempt | None:
        """Let one request through, or not."""
        if not self.is_closed:
            if self.is_tripped(now):
                return None
            self._trials += 1
        return Attempt(self, self._epoch, source)

    def ended(
        self, epoch: int, source: str, is_success: bool | None, now: float, doubtful_source: str | None = None
    ) -> None:
        if is_success:
            if source != self._well[0]:
                self._well_before = self._well
            self._well = source, now
        if epoch != self._epoch:
            return
        if self.is_closed:
            if is_success is not None:
                self._count(is_success, now, doubtful_source)
            return
        self._trials -= 1
        if is_success is False:
            self._row.append(doubtful_source)
            if _counted(self._row):
                self._trip(now, min(self._settings.most_open_s, self._open_s * 2))
        elif is_success:
            self._successes += 1
            if self._successes >= self._settings.successes_to_close:
                self._close()

    def proved(self, epoch: int, source: str, now: float) -> None:
        """A failure that was in doubt: nothing if others of another source did well here meanwhile."""
        _, at = self._well if self._well[0] != source else self._well_before
        if epoch == self._epoch and self.is_closed and now - at >= self._settings.window_s:
            doubt = next((one for one in self._failures if one[1] == source), None)
            if doubt is not None:
                self._failures.remove(doubt)
            if source in self._row:
                self._row.remove(source)
            self._failures.append((now, None))
            self._row.append(None)
            self._judge(now)

    def _count(self, is_success: bool, now: float, doubtful_source: str | None) -> None:
        settings, window = self._settings, self._window
        if not window or now - window[-1].at >= _BUCKET_S:
            window.append(_Bucket(now))
        while now - window[0].at >= settings.window_s:
            window.popleft()
        if is_success:
            window[-1].succeeded += 1
            self._row.clear()
            return
        self._failures.append((now, doubtful_source))
        self._row.append(doubtful_source)
        self._judge(now)

    def _judge(self, now: float) -> None:
        settings = self._settings
        while self._failures and now - self._failures[0][0] >= settings.window_s:
            self._failures.popleft()
        failed = _counted(source for _, source in self._failures)
        ended = failed + sum(bucket.succeeded for bucket in self._window)
        is_rate_high = ended >= settings.least_requests and failed > settings.failure_rate * ended
        if is_rate_high or _counted(self._row) >= settings.failures_in_a_row:
            self._trip(now, settings.open_s)

    def _trip(self, now: float, open_s: float) -> None:
        self.is_closed = False
        self._open_s = open_s
        self._opens_at = now + open_s
        self._begin_epoch()

    def _close(self) -> None:
        self.is_closed = True
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._window.clear()
        self._failures.clear()
        self._row.clear()
        self._trials = self._successes = 0


def _counted(sources: Iterable[str | None]) -> int:
    """Failures that count: all that are certain; of the source with the most others, as many as of the rest."""
    found = Counter(sources)
    certain, most = found.pop(None, 0), max(found.values(), default=0)
    rest = found.total() - most
    return certain + rest + min(most, rest)
