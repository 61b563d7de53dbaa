"""One request's life as a state machine: events in, actions out, and one end.

    NEW -> RESERVING -> SUBMITTED -> SENT -> ENDED
                            ^         |
                            |         +-> PICKING -> BACKING_OFF -> SENT    nothing was written: another replica
                            |         +-> PICKING -> SENT                   a part was: the rest, from another replica
                            |                     -> STRANDED -> PICKING    or, while there is none, a wait for one
                            +---------- FALLING_BACK                        the next model

A shell tells it what happened and does what it answers: clients' requests over HTTP (`proxied_request`), the gateway's
own (`direct_request`), the simulator. The journey does no I/O and reads no clock; a timer is an event. An event that
comes when it cannot matter any more, or twice, is answered with nothing; whatever the order of events, there is one
`Settle`, and nothing is sent or written after it.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto

import msgspec

from penstock.core.errors import EngineFailed, EngineUnavailable, PenstockError
from penstock.core.request import KvSource
from penstock.gateway.records.facts import Ending, ending_of
from penstock.health import quarantine
from penstock.health.retries import RetryBudget, Tries
from penstock.router.routes import Failure

_BUSY = 429
_TRY_ELSEWHERE = (429, 500, 502, 503, 504, 529)  # from a replica: another may do better


class State(Enum):
    NEW = auto()
    RESERVING = auto()  # from its tenant's limits
    SUBMITTED = auto()  # to admission, which may have put it into a queue
    PICKING = auto()  # another replica
    BACKING_OFF = auto()  # before it is sent there
    SENT = auto()
    STRANDED = auto()  # a part is written, and no replica can go on with it now
    FALLING_BACK = auto()  # to another model, if there is one
    ENDED = auto()


class Role(StrEnum):
    """A replica's part in an answer: one answers, whoever has computed its prompt."""

    WHOLE = "whole"


class Leg(msgspec.Struct, frozen=True, gc=False):
    role: Role
    replica: str
    source: KvSource | None = None  # another, that KV blocks of the prompt can be pulled from; it is no attempt
    source_replica: str = ""  # the same by its id


class Charge(Enum):
    """The charge to the tenant at an end."""

    NOTHING = auto()  # nobody worked for it
    REQUEST = auto()  # one request and no tokens: its replica calls it wrong
    WHOLE = auto()  # the answer's usage, else what it may have been
    SEEN = auto()  # what has come so far, else all that may have been made for it
    PART = auto()  # what has come so far, if it is of use


class Action(msgspec.Struct, frozen=True):
    pass


class Reserve(Action, frozen=True):
    """Reserves from the tenant's limits; answered with `reserved` or `refused`."""


class Submit(Action, frozen=True):
    """Asks admission; answered with `admitted` or `shed`, at once or after a wait in its queue."""


class Pick(Action, frozen=True):
    """Asks the router for another replica; answered at once, with `picked`."""


class Send(Action, frozen=True):
    legs: tuple[Leg, ...]
    is_rest: bool  # a part is written, and this asks for what is left


class SendLater(Action, frozen=True):
    """Sets a timer to a random part of `max_s`, which tells `backed_off` the same legs."""

    legs: tuple[Leg, ...]
    max_s: float


class Strand(Action, frozen=True):
    """Waits for a replica; answered with `replica_back` or `waited_enough`."""


class FallBack(Action, frozen=True):
    """Asks for the next model; answered at once, with `fell_back` or `has_no_fallback`."""

    failure: Failure


class Quarantine(Action, frozen=True):
    """Has the same body refused from now on."""


class Refuse(Action, frozen=True):
    """Writes the error as the whole answer."""

    error: PenstockError


class PassOn(Action, frozen=True):
    """Writes the answer that was declined last as the whole answer."""


class BreakOff(Action, frozen=True):
    """Writes the error as the stream's last event."""

    error: PenstockError


class Settle(Action, frozen=True):
    """Closes reservation, admission, bill and records: the end."""

    charge: Charge
    ending: Ending = Ending.OK
    reason: str = ""


Actions = tuple[Action, ...]

_NOTHING: Actions = ()
_RESERVE, _SUBMIT, _PICK, _STRAND = (Reserve(),), (Submit(),), (Pick(),), (Strand(),)
_ANSWERED = (Settle(Charge.WHOLE),)


class Journey(msgspec.Struct, eq=False):
    _budget: RetryBudget  # second tries of the whole gateway
    has_fallbacks: bool = False  # there may be other models for it
    state: State = State.NEW
    is_begun: bool = False  # the client has seen a part of its answer
    legs: tuple[Leg, ...] = ()  # of the present attempt, or the next
    tries: Tries = msgspec.field(default_factory=Tries)
    _declined: int | None = None  # status of an answer that was kept back
    _is_held_back: bool = False  # it was for the next model to do better
    _before: State = State.NEW  # it was asked for another model
    _otherwise: Actions = _NOTHING  # the end, if there is none

    @property
    def is_open(self) -> bool:
        return self.state is not State.ENDED

    # -- in

    def begin(self, *, has_limits: bool) -> Actions:
        if self.state is not State.NEW:
            return _NOTHING
        self.state = State.RESERVING if has_limits else State.SUBMITTED
        return _RESERVE if has_limits else _SUBMIT

    def reserved(self) -> Actions:
        if self.state is not State.RESERVING:
            return _NOTHING
        self.state = State.SUBMITTED
        return _SUBMIT

    def refused(self, error: PenstockError) -> Actions:
        """Its tenant's limits have no room for it, or its server must not be sent it."""
        if self.state is State.ENDED:
            return _NOTHING
        return self._break_off() if self.is_begun else self._end(_refusal(error))

    def admitted(self, leg: Leg) -> Actions:
        """It has this replica. One of the gateway's own, which asks nobody, begins with this event."""
        if self.state is not State.SUBMITTED and self.state is not State.NEW:
            return _NOTHING
        return self._send((leg,))

    def shed(self, failure: Failure, error: PenstockError) -> Actions:
        return self._fall_back(failure, _refusal(error)) if self.state is State.SUBMITTED else _NOTHING

    # -- an answer

    def head(self, status: int, *, is_held_back: bool = False) -> bool:
        """Whether this answer is passed on. One of an overloaded or broken replica is not while another can be tried;
        `is_held_back`: nor is this one, since the next model may have a better one."""
        if self.state is not State.SENT:
            return False
        self._is_held_back = is_held_back
        if is_held_back or (status != 200 and (self.is_begun or status in _TRY_ELSEWHERE)):
            return False
        for leg in self.legs:
            self.tries.answered(leg.replica)
        return True

    def bytes_came(self) -> None:
        """The first of the answer's body are written."""
        if self.state is State.SENT:
            self.is_begun = True

    def completed(self, status: int) -> Actions:
        """An answer that was passed on is whole."""
        if self.state is not State.SENT:
            return _NOTHING
        self.state = State.ENDED
        if 200 <= status < 300:
            return _ANSWERED
        return (Settle(_charge_of_refusal(status), Ending.REFUSED, f"replica_{status}"),)

    def failed(self, *, is_lost: bool, num_tokens: int, is_resumable: bool) -> Actions:
        """An answer failed, or ended too early. `is_lost`: so did the replica, after it had made `num_tokens`;
        `is_resumable`: another can carry on what is written."""
        if self.state is not State.SENT:
            return _NOTHING
        self._declined = None
        return self._quarantine(num_tokens, is_lost=is_lost) or self._go_elsewhere(is_resumable=is_resumable)

    def declined(
        self, status: int, failure: Failure | None, *, is_lost: bool, num_tokens: int, is_resumable: bool
    ) -> Actions:
        """An answer came that is not passed on. `failure`: as the next model would see it, None: it would not help."""
        if self.state is not State.SENT:
            return _NOTHING
        self._declined = status
        if quarantined := self._quarantine(num_tokens, is_lost=is_lost):
            return quarantined
        if self.is_begun or not self._is_held_back:
            return self._go_elsewhere(is_resumable=is_resumable)
        answer = _declined_answer(status)
        return self._fall_back(failure, answer) if failure is not None else self._end(answer)

    def source_failed(self, *, is_lost: bool) -> Actions:
        """The replica that was to compute the prompt failed, and the one that answers can do nothing without: that may
        be tried again, with another. `is_lost`: so was the first, with this request."""
        if self.state is not State.SENT or self.is_begun:
            return _NOTHING
        self._declined, leg = None, self.legs[0]
        self.tries.replicas.discard(leg.replica)
        self.tries.replicas.add(leg.source_replica)
        quarantined = self._quarantine(0, is_lost=is_lost, replica=leg.source_replica)
        return quarantined or self._go_elsewhere(is_resumable=False)

    def replica_lost(self, *, num_tokens: int, is_resumable: bool) -> Actions:
        """It hangs, or is gone without its connection saying so."""
        if self.state is not State.SENT:
            return _NOTHING
        return self._quarantine(num_tokens, is_lost=True) or self._go_elsewhere(is_resumable=is_resumable)

    def client_gone(self, *, has_all: bool = False) -> Actions:
        """`has_all`: of the answer's text; many do not wait for the end in form."""
        if self.state is State.ENDED:
            return _NOTHING
        worked = self.is_begun or self.state is State.SENT
        ending = Ending.OK if has_all and self.state is State.SENT else Ending.CLIENT_GONE
        return self._end((Settle(Charge.SEEN if worked else Charge.NOTHING, ending),))

    # -- elsewhere

    def picked(self, leg: Leg | None) -> Actions:
        """Another replica; None: there is none for it."""
        if self.state is not State.PICKING:
            return _NOTHING
        if self.is_begun:
            if leg is not None:
                return self._send((leg,))
            self.state = State.STRANDED
            return _STRAND
        if leg is None:
            return self._nowhere()
        self.state, self.legs = State.BACKING_OFF, (leg,)
        return (SendLater(self.legs, self.tries.max_backoff_s),)

    def backed_off(self, legs: tuple[Leg, ...]) -> Actions:
        is_awaited = self.state is State.BACKING_OFF and legs is self.legs
        return self._send(legs) if is_awaited else _NOTHING

    def replica_back(self) -> Actions:
        """A replica may take it now."""
        if self.state is not State.STRANDED:
            return _NOTHING
        self.state = State.PICKING
        return _PICK

    def waited_enough(self) -> Actions:
        """No replica has come back in time."""
        return self._break_off() if self.state is State.STRANDED else _NOTHING

    def too_slow(self) -> Actions:
        """The present model has had its time for the first byte."""
        if self.is_begun or self.state not in (State.SUBMITTED, State.BACKING_OFF, State.SENT):
            return _NOTHING
        return self._fall_back(Failure.SLOW, _NOTHING)

    def fell_back(self) -> Actions:
        """It goes to another model, as if that had been asked for."""
        if self.state is not State.FALLING_BACK:
            return _NOTHING
        self.state = State.SUBMITTED
        self.tries, self._declined = Tries(self.tries.losses), None
        return _SUBMIT

    def has_no_fallback(self) -> Actions:
        if self.state is not State.FALLING_BACK:
            return _NOTHING
        self.state = self._before
        return self._end(self._otherwise) if self._otherwise else _NOTHING

    # -- inside

    def _send(self, legs: tuple[Leg, ...]) -> Actions:
        self.state, self.legs = State.SENT, legs
        for leg in legs:
            self.tries.replicas.add(leg.replica)
        return (Send(legs, self.is_begun),)

    def _go_elsewhere(self, *, is_resumable: bool) -> Actions:
        if self.is_begun:  # the rest must follow it without a gap
            if not (is_resumable and self.tries.move()):
                return self._break_off()
        elif not self.tries.retry(self._budget):
            return self._nowhere()
        self.state = State.PICKING
        return _PICK

    def _nowhere(self) -> Actions:
        """No other replica of this model: the last one's answer stands, if there was one."""
        if self._declined is not None:
            return self._fall_back(Failure.ERROR, _declined_answer(self._declined))
        return self._fall_back(
            Failure.ERROR, _refusal(EngineUnavailable("no replica could take this request", retry_after_s=1.0))
        )

    def _fall_back(self, failure: Failure, otherwise: Actions) -> Actions:
        if not self.has_fallbacks:
            return self._end(otherwise) if otherwise else _NOTHING
        self._before, self._otherwise = self.state, otherwise
        self.state = State.FALLING_BACK
        return (FallBack(failure),)

    def _quarantine(self, num_tokens: int, *, is_lost: bool, replica: str = "") -> Actions:
        """If a replica was lost with this request, and that is one too many, it ends here, and pays for what it used,
        or might have."""
        losses = self.tries.losses
        if is_lost:
            losses.add(replica or self.legs[-1].replica, num_tokens)
        if not (is_lost and losses.is_culprit):
            return _NOTHING
        error = quarantine.refusal()
        told = BreakOff(error) if self.is_begun else Refuse(error)
        return self._end((Quarantine(), told, Settle(Charge.SEEN, *ending_of(error))))

    def _break_off(self) -> Actions:
        error = EngineFailed("the replica failed in the middle of the answer")
        return self._end((BreakOff(error), Settle(Charge.PART, *ending_of(error))))

    def _end(self, actions: Actions) -> Actions:
        self.state = State.ENDED
        return actions


def _refusal(error: PenstockError) -> Actions:
    return Refuse(error), Settle(Charge.NOTHING, *ending_of(error))


def _declined_answer(status: int) -> Actions:
    """Every replica said no: the client gets the last one's answer."""
    ending = Ending.FAILED if status >= 500 else Ending.REFUSED
    return PassOn(), Settle(_charge_of_refusal(status), ending, f"replica_{status}")


def _charge_of_refusal(status: int) -> Charge:
    return Charge.REQUEST if 400 <= status < 500 and status != _BUSY else Charge.NOTHING
