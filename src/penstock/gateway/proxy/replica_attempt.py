"""One request at one replica: counted there as long as it lasts, and told to its circuit breaker once."""

from __future__ import annotations

from penstock.api.relay import carry_on_comment
from penstock.core.errors import EngineFailed
from penstock.gateway.replicas.replica import InFlightRequest, Replica
from penstock.http.forward import End, Outcome

_ENGINE_DIED = b'"code":"%b"' % EngineFailed.code.encode()  # in an error of a penstock replica
_STREAM_DIED = carry_on_comment(EngineFailed(""))  # instead of the end of one of its streams
_BUSY = (429, 503, 529)  # it works, and says that it cannot now


class ReplicaAttempt:
    __slots__ = ("_attempt", "_request", "replica")

    def __init__(self, replica: Replica, request: InFlightRequest, now: float, source: str = "") -> None:
        """`source`: whose request it is, for the breaker."""
        self.replica = replica
        self._request = request
        self._attempt = replica.breaker.begin(now, source)
        replica.attach(request)

    def end(self, is_blamed: bool | None, now: float, *, is_doubtful: bool = False) -> bool:
        """None: what happened says nothing about the replica; `is_doubtful`: it may have been the request. Returns
        whether its breaker opened or closed by it."""
        breaker = self.replica.breaker
        self.replica.detach(self._request)
        if self._attempt is None:
            return False
        if is_blamed is False and breaker.is_closed:
            self._attempt.succeeded(now)
            return False  # a success opens nothing
        was_tripped = breaker.is_tripped(now)
        if is_blamed is None:
            self._attempt.abandoned(now)
        elif not is_blamed:
            self._attempt.succeeded(now)
        else:
            self._attempt.doubted(now) if is_doubtful else self._attempt.failed(now)
        return breaker.is_tripped(now) != was_tripped

    def prove(self, now: float) -> bool:
        """The request that ended in doubt did well elsewhere. Returns whether the breaker opened by it."""
        was_tripped = self.replica.breaker.is_tripped(now)
        if self._attempt is not None:
            self._attempt.proved(now)
        return self.replica.breaker.is_tripped(now) != was_tripped


def is_lost(outcome: Outcome, *, relays: bool) -> bool:
    """Whether the replica, or its engine, was lost while it had this request (`quarantine`). `relays`: it is a penstock
    replica, whose word for its engine counts."""
    match outcome.end:
        case End.FAILED_BEFORE | End.FAILED_AFTER:
            return outcome.failure is not None and outcome.failure.was_sent
        case End.UNFINISHED:
            return outcome.tail.endswith(_STREAM_DIED)
        case End.DECLINED:
            return relays and (outcome.status or 0) >= 500 and _ENGINE_DIED in outcome.tail
        case _:
            return False


def is_replicas_fault(outcome: Outcome) -> bool | None:
    """None: it says nothing about the replica."""
    match outcome.end:
        case End.CLIENT_GONE:
            return None
        case End.DECLINED:
            return None if outcome.status in _BUSY or (outcome.status or 0) < 500 else True
        case _:
            return outcome.end in (End.FAILED_BEFORE, End.FAILED_AFTER)
