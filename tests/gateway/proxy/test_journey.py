"""The journey of one request, in whatever order things happen: it ends once, is paid once, and is silent after."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.errors import Overloaded, RateLimited
from penstock.gateway.proxy.journey import (
    Action,
    Actions,
    BreakOff,
    Charge,
    FallBack,
    Journey,
    Leg,
    PassOn,
    Pick,
    Quarantine,
    Refuse,
    Reserve,
    Role,
    Send,
    SendLater,
    Settle,
    State,
    Strand,
    Submit,
)
from penstock.gateway.records.facts import Ending
from penstock.health.quarantine import ALIBI_TOKENS
from penstock.health.retries import RetryBudget
from penstock.router.routes import Failure
from tests.examples import examples

REPLICAS = tuple("abcd")
STATUSES = st.sampled_from((200, 200, 200, 204, 400, 404, 429, 500, 503))
RARELY = st.sampled_from((False, False, False, False, False, True))
TOKENS = st.sampled_from((0, 1, ALIBI_TOKENS))
WRITES = Refuse, PassOn, BreakOff


def leg(replica: str) -> Leg:
    return Leg(Role.WHOLE, replica)


class FakeWorld(RuleBasedStateMachine):
    """A shell that does what a journey says, at a limiter, an admission, replicas and a client that do as they like."""

    @initialize(
        has_limits=st.booleans(),
        num_models=st.integers(1, 3),
        tries=st.sampled_from((0, 2, 20)),
        leaves_after=st.integers(0, 40),
        slow_after=st.integers(0, 40),
        ends_after=st.integers(0, 20),
    )
    def start(
        self, has_limits: bool, num_models: int, tries: int, leaves_after: int, slow_after: int, ends_after: int
    ) -> None:
        """The client leaves, the model is slow and an answer ends after so many events, if ever: any one would do, and
        most of what can happen comes before."""
        self.num_events, self.leaves_after, self.slow_after, self.ends_after = 0, leaves_after, slow_after, ends_after
        self.journey = Journey(RetryBudget(most=float(tries)), has_fallbacks=num_models > 1)
        self.fallbacks_left = num_models - 1
        self.reserving = self.holds_reservation = self.is_entered = self.is_flying = self.is_passed_on = False
        self.num_reserved = self.num_closed = self.num_entered = self.num_finished = 0
        self.settled: list[Settle] = []
        self.declined: int | None = None
        self.timers: list[tuple[Leg, ...]] = []
        self.is_stranded = self.is_gone = self.is_begun = self.is_answered = False
        self.lost: set[str] = set()
        self.is_quarantined = False
        self.do(self.journey.begin(has_limits=has_limits))

    # -- what it says is done

    def do(self, actions: Actions) -> None:
        self.num_events += 1
        for action in actions:
            assert not self.settled, "nothing comes after the end"
            self.do_one(action)

    def do_one(self, action: Action) -> None:
        match action:
            case Reserve():
                assert self.num_reserved == 0
                self.num_reserved, self.reserving = 1, True
            case Submit():
                assert not self.is_entered
                assert not self.reserving
                self.num_entered += 1
                self.is_entered = True
            case Send(legs, is_rest):
                assert not self.is_flying
                assert not self.is_gone
                assert self.is_entered
                assert is_rest == self.is_begun
                assert legs == self.journey.legs
                self.is_flying, self.is_passed_on, self.is_stranded = True, False, False
            case SendLater(legs):
                assert not self.is_flying
                assert not self.is_begun
                self.timers.append(legs)
            case Pick():
                assert not self.is_flying
                assert not self.is_gone
            case Strand():
                assert self.is_begun
                assert not self.is_flying
                self.is_stranded = True
            case FallBack():
                assert not self.is_begun
            case Quarantine():
                assert self.lost
                self.is_quarantined = True
            case Refuse() | PassOn():
                assert not self.is_begun
                assert not self.is_answered
                assert not self.is_gone
                assert isinstance(action, Refuse) or self.declined is not None
                self.is_answered = True
            case BreakOff():
                assert self.is_begun
                assert not self.is_answered
                assert not self.is_gone
                self.is_answered = True
            case Settle():
                self.settle(action)

    def settle(self, end: Settle) -> None:
        self.settled.append(end)
        assert self.is_gone or self.is_answered
        assert (end.charge is Charge.WHOLE) == (end.ending is Ending.OK and not self.is_gone)
        if self.holds_reservation:
            self.num_closed += 1
        self.holds_reservation = self.reserving = False
        if self.is_entered:
            self.num_finished += 1
        self.is_entered = self.is_stranded = self.is_flying = False

    @property
    def is_asked(self) -> bool:
        """It waits for an answer that comes before anything else can happen."""
        return self.journey.state in (State.PICKING, State.FALLING_BACK)

    # -- what happens

    @precondition(lambda self: self.reserving)
    @rule(is_refused=RARELY)
    def limiter_answers(self, is_refused: bool) -> None:
        self.reserving = False
        self.holds_reservation = not is_refused
        self.do(self.journey.refused(RateLimited("")) if is_refused else self.journey.reserved())

    @precondition(lambda self: self.journey.state is State.SUBMITTED)
    @rule(replica=st.sampled_from(REPLICAS), is_shed=RARELY, failure=st.sampled_from(Failure))
    def admission_decides(self, replica: str, is_shed: bool, failure: Failure) -> None:
        forbidden = self.journey.tries.losses.forbidden(REPLICAS)
        if is_shed or replica in forbidden:
            self.do(self.journey.shed(failure, Overloaded("")))
        else:
            self.do(self.journey.admitted(leg(replica)))

    @precondition(lambda self: self.is_flying and not (self.is_asked or self.is_passed_on))
    @rule(status=STATUSES, is_held_back=RARELY, failure=st.sampled_from((*Failure, None)), is_lost=st.booleans())
    def head_comes(self, status: int, is_held_back: bool, failure: Failure | None, is_lost: bool) -> None:
        if self.journey.head(status, is_held_back=is_held_back and self.fallbacks_left > 0):
            self.is_passed_on = True
        else:
            self.leave(is_lost)
            self.declined = status
            self.do(self.journey.declined(status, failure, is_lost=is_lost, num_tokens=0, is_resumable=True))

    @precondition(lambda self: self.is_flying and self.is_passed_on and not self.is_asked)
    @rule()
    def bytes_come(self) -> None:
        assert not self.is_answered, "nothing is written after the end"
        assert not self.is_gone, "nothing is written after the end"
        assert not self.settled, "nothing is written after the end"
        self.is_begun = True
        self.journey.bytes_came()

    @precondition(lambda self: self.is_flying and self.is_passed_on and not self.is_asked)
    @precondition(lambda self: self.num_events >= self.ends_after)
    @rule(status=STATUSES)
    def upstream_ends(self, status: int) -> None:
        self.is_flying, self.is_answered = False, True
        if self.is_begun:
            status = 200
        self.do(self.journey.completed(status))

    @precondition(lambda self: self.is_flying and not self.is_asked)
    @rule(is_lost=st.booleans(), num_tokens=TOKENS, is_resumable=st.booleans(), hangs=st.booleans())
    def upstream_fails(self, is_lost: bool, num_tokens: int, is_resumable: bool, hangs: bool) -> None:
        self.leave(is_lost or hangs)
        if hangs:
            self.do(self.journey.replica_lost(num_tokens=num_tokens, is_resumable=is_resumable))
        else:
            self.declined = None
            self.do(self.journey.failed(is_lost=is_lost, num_tokens=num_tokens, is_resumable=is_resumable))

    def leave(self, is_lost: bool) -> None:
        self.is_flying = False
        if is_lost:
            self.lost.add(self.journey.legs[-1].replica)

    @precondition(lambda self: self.journey.state is State.PICKING)
    @rule(replica=st.sampled_from((*REPLICAS, *REPLICAS, None)))
    def router_picks(self, replica: str | None) -> None:
        if replica in self.journey.tries.losses.forbidden(REPLICAS):
            replica = None
        self.do(self.journey.picked(None if replica is None else leg(replica)))

    @precondition(lambda self: self.journey.state is State.FALLING_BACK)
    @rule()
    def chain_moves(self) -> None:
        if not self.fallbacks_left:
            self.do(self.journey.has_no_fallback())
            return
        self.fallbacks_left -= 1
        self.num_finished += 1
        self.is_entered = self.is_flying = False
        self.declined = None
        self.do(self.journey.fell_back())

    @precondition(lambda self: bool(self.timers) and not self.is_asked)
    @rule()
    def backoff_is_over(self) -> None:
        self.do(self.journey.backed_off(self.timers.pop()))

    @precondition(lambda self: self.is_stranded and not self.is_asked)
    @rule(is_enough=RARELY)
    def stranded_wait_ends(self, is_enough: bool) -> None:
        self.do(self.journey.waited_enough() if is_enough else self.journey.replica_back())

    @precondition(lambda self: self.num_events >= self.slow_after and not (self.is_asked or self.settled))
    @rule()
    def model_is_slow(self) -> None:
        self.do(self.journey.too_slow())

    @precondition(lambda self: self.num_events >= self.leaves_after and not (self.is_asked or self.is_answered))
    @precondition(lambda self: not self.is_gone)
    @rule(has_all=st.booleans())
    def client_leaves(self, has_all: bool) -> None:
        self.is_gone = True
        self.is_flying = False
        self.do(self.journey.client_gone(has_all=has_all))

    @precondition(lambda self: bool(self.settled))
    @rule()
    def nothing_more_happens(self) -> None:
        assert self.journey.client_gone() == self.journey.replica_back() == self.journey.reserved() == ()

    # -- what holds

    @invariant()
    def it_ends_once(self) -> None:
        assert len(self.settled) <= 1
        assert bool(self.settled) == (not self.journey.is_open)

    @invariant()
    def at_most_two_replicas_are_lost(self) -> None:
        assert len(self.lost) <= 2

    @invariant()
    def nothing_is_kept_after_the_end(self) -> None:
        assert self.num_finished == self.num_entered - self.is_entered
        assert self.num_closed <= self.num_reserved
        if self.settled:
            assert not self.holds_reservation
            assert not self.is_entered
            assert not self.is_flying

    def teardown(self) -> None:
        """Nobody does anything any more, but for timers and those that must answer: that is enough for it to end."""
        if not hasattr(self, "journey"):
            return
        while self.journey.is_open:
            match self.journey.state:
                case State.RESERVING:
                    self.limiter_answers(is_refused=False)
                case State.SUBMITTED:
                    self.admission_decides("a", is_shed=True, failure=Failure.ERROR)
                case State.SENT:
                    self.upstream_fails(is_lost=True, num_tokens=0, is_resumable=True, hangs=False)
                case State.PICKING:
                    self.router_picks(None)
                case State.FALLING_BACK:
                    self.chain_moves()
                case State.BACKING_OFF:
                    self.do(self.journey.backed_off(self.journey.legs))
                case State.STRANDED:
                    self.stranded_wait_ends(is_enough=True)
        self.it_ends_once()
        self.nothing_is_kept_after_the_end()
        for legs in self.timers:
            assert self.journey.backed_off(legs) == ()


TestJourneyInAnyWorld = pytest.mark.slow(FakeWorld.TestCase)
TestJourneyInAnyWorld.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)

FAILS = {"num_tokens": TOKENS, "is_resumable": st.booleans()}
EVENTS = st.one_of(
    *(
        st.tuples(st.just(name), st.fixed_dictionaries(arguments))
        for name, arguments in {
            "begin": {"has_limits": st.booleans()},
            "reserved": {},
            "refused": {"error": st.just(RateLimited(""))},
            "admitted": {"leg": st.sampled_from(REPLICAS).map(leg)},
            "shed": {"failure": st.sampled_from(Failure), "error": st.just(Overloaded(""))},
            "head": {"status": STATUSES, "is_held_back": st.booleans()},
            "bytes_came": {},
            "completed": {"status": STATUSES},
            "failed": FAILS | {"is_lost": st.booleans()},
            "declined": FAILS
            | {"status": STATUSES, "failure": st.sampled_from((*Failure, None)), "is_lost": st.booleans()},
            "replica_lost": FAILS,
            "client_gone": {"has_all": st.booleans()},
            "picked": {"leg": st.sampled_from(REPLICAS).map(leg) | st.none()},
            "replica_back": {},
            "waited_enough": {},
            "too_slow": {},
            "fell_back": {},
            "has_no_fallback": {},
        }.items()
    )
)


@given(events=st.lists(EVENTS, max_size=30), has_fallbacks=st.booleans())
def test_events_that_make_no_sense_end_it_at_most_once_and_are_silent_after(
    events: list[tuple[str, dict[str, Any]]], has_fallbacks: bool
) -> None:
    journey, seen = Journey(RetryBudget(), has_fallbacks=has_fallbacks), list[Action]()
    for name, arguments in events:
        was_open = journey.is_open
        answer = getattr(journey, name)(**arguments)
        actions = answer if isinstance(answer, tuple) else ()
        assert was_open or not actions
        for action in actions:
            if isinstance(action, SendLater):
                seen.extend(journey.backed_off(action.legs))
        seen.extend(actions)
    seen.extend(journey.client_gone())
    ends = [action for action in seen if isinstance(action, Settle)]
    assert len(ends) == 1
    assert seen[-1] is ends[0]
    assert sum(isinstance(action, WRITES) for action in seen) <= 1


def sent(*, has_fallbacks: bool = False) -> Journey:
    journey = Journey(RetryBudget(), has_fallbacks=has_fallbacks)
    assert journey.begin(has_limits=False) == (Submit(),)
    assert journey.admitted(leg("a")) == (Send((leg("a"),), is_rest=False),)
    return journey


def test_a_backoff_from_before_a_fallback_sends_nothing() -> None:
    journey = sent(has_fallbacks=True)
    journey.failed(is_lost=False, num_tokens=0, is_resumable=False)
    (later,) = journey.picked(leg("b"))
    assert isinstance(later, SendLater)
    assert journey.too_slow() == (FallBack(Failure.SLOW),)
    assert journey.fell_back() == (Submit(),)
    assert journey.backed_off(later.legs) == ()
    assert journey.admitted(leg("c")) == (Send((leg("c"),), is_rest=False),)
    assert journey.backed_off(later.legs) == ()
    journey.failed(is_lost=False, num_tokens=0, is_resumable=False)
    (next_later,) = journey.picked(leg("d"))
    assert journey.backed_off(later.legs) == ()
    assert isinstance(next_later, SendLater)
    assert journey.backed_off(next_later.legs) == (Send((leg("d"),), is_rest=False),)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_request_that_lost_two_replicas_is_quarantined(is_begun: bool) -> None:
    journey = sent()
    assert journey.failed(is_lost=True, num_tokens=0, is_resumable=True) == (Pick(),)
    (later,) = journey.picked(leg("b"))
    assert isinstance(later, SendLater)
    journey.backed_off(later.legs)
    if is_begun:
        journey.head(200)
        journey.bytes_came()
    put_away, told, end = journey.failed(is_lost=True, num_tokens=ALIBI_TOKENS - 1, is_resumable=True)
    assert isinstance(put_away, Quarantine)
    assert isinstance(told, BreakOff if is_begun else Refuse)
    assert end == Settle(Charge.SEEN, Ending.REFUSED, "request_quarantined")
    assert journey.tries.losses.replicas == {"a", "b"}


def test_a_stream_is_moved_ten_times_and_no_more() -> None:
    journey = sent()
    journey.head(200)
    journey.bytes_came()
    for number in range(10):
        assert journey.failed(is_lost=False, num_tokens=0, is_resumable=True) == (Pick(),)
        assert journey.picked(leg(f"r{number}")) == (Send((leg(f"r{number}"),), is_rest=True),)
    told, end = journey.failed(is_lost=False, num_tokens=0, is_resumable=True)
    assert isinstance(told, BreakOff)
    assert end == Settle(Charge.PART, Ending.FAILED, "engine_failed")


def test_a_slow_model_without_a_next_one_is_waited_for() -> None:
    journey = sent(has_fallbacks=True)
    assert journey.too_slow() == (FallBack(Failure.SLOW),)
    assert journey.has_no_fallback() == ()
    assert journey.head(200)
    assert journey.completed(200) == (Settle(Charge.WHOLE),)


@pytest.mark.parametrize(
    ("status", "charge"), [(400, Charge.REQUEST), (404, Charge.REQUEST), (429, Charge.NOTHING), (503, Charge.NOTHING)]
)
def test_a_refusal_costs_a_request_only_where_the_request_is_wrong(status: int, charge: Charge) -> None:
    journey = sent()
    is_passed_on = journey.head(status)
    assert is_passed_on == (status < 429)
    if is_passed_on:
        (end,) = journey.completed(status)
    else:
        assert journey.declined(status, None, is_lost=False, num_tokens=0, is_resumable=False) == (Pick(),)
        _, end = journey.picked(None)
    assert isinstance(end, Settle)
    assert end.charge is charge


def test_a_client_that_leaves_pays_for_what_was_made() -> None:
    waiting, answered = Journey(RetryBudget()), sent()
    waiting.begin(has_limits=True)
    assert waiting.client_gone() == (Settle(Charge.NOTHING, Ending.CLIENT_GONE),)
    assert waiting.reserved() == ()
    answered.head(200)
    answered.bytes_came()
    assert answered.client_gone(has_all=True) == (Settle(Charge.SEEN, Ending.OK),)
