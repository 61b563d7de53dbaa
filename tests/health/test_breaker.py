import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.health.breaker import Attempt, BreakerSettings, BreakerState, CircuitBreaker


def send(breaker: CircuitBreaker, outcomes: str, now: float = 0.0) -> None:
    for outcome in outcomes:
        attempt = breaker.begin(now)
        assert attempt is not None
        {"+": attempt.succeeded, "-": attempt.failed, "0": attempt.abandoned}[outcome](now)


def test_failures_in_a_row_open_it_however_good_the_window_was() -> None:
    breaker = CircuitBreaker()
    send(breaker, "+" * 100 + "-" * 9)
    assert not breaker.is_tripped(0.0)
    send(breaker, "-")
    assert breaker.is_tripped(0.0)
    assert breaker.begin(4.9) is None


def test_more_than_half_failing_opens_it_once_there_are_enough() -> None:
    breaker = CircuitBreaker()
    send(breaker, "--+-")
    assert not breaker.is_tripped(0.0)
    send(breaker, "-")
    assert breaker.is_tripped(0.0)


def test_failures_of_a_minute_ago_are_forgotten() -> None:
    breaker = CircuitBreaker()
    send(breaker, "-+--", now=0.0)
    send(breaker, "-", now=61.0)
    assert not breaker.is_tripped(61.0)


def test_who_went_away_says_nothing() -> None:
    breaker = CircuitBreaker()
    send(breaker, "0" * 50)
    assert breaker.state(0.0) is BreakerState.CLOSED


def test_half_open_lets_three_through_and_closes_when_they_succeed() -> None:
    breaker = CircuitBreaker()
    send(breaker, "-" * 5)
    trials = [breaker.begin(5.0) for _ in range(4)]
    assert trials[3] is None
    assert breaker.state(5.0) is BreakerState.HALF_OPEN
    for trial in trials[:3]:
        assert trial is not None
        trial.succeeded(5.1)
    assert breaker.state(5.1) is BreakerState.CLOSED


def test_a_trial_that_is_abandoned_gives_its_place_back() -> None:
    breaker = CircuitBreaker()
    send(breaker, "-" * 5)
    for _ in range(20):
        send(breaker, "0", now=6.0)
    assert not breaker.is_tripped(6.0)


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_a_minute() -> None:
    breaker, now, waits = CircuitBreaker(), 0.0, []
    send(breaker, "-" * 5)
    for _ in range(6):
        opened = now
        while breaker.is_tripped(now):
            now += 0.5
        waits.append(now - opened)
        send(breaker, "-", now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_what_began_before_it_opened_does_not_count_as_a_trial() -> None:
    breaker = CircuitBreaker()
    old = breaker.begin(0.0)
    assert old is not None
    send(breaker, "-" * 5)
    trial = breaker.begin(5.0)
    assert trial is not None
    old.failed(5.1)
    assert breaker.state(5.1) is BreakerState.HALF_OPEN


def doubt(breaker: CircuitBreaker, source: str, times: int = 1, now: float = 0.0) -> list[Attempt]:
    """Errors that a replica answers these requests with."""
    found = []
    for _ in range(times):
        attempt = breaker.begin(now, source)
        assert attempt is not None
        attempt.doubted(now)
        found.append(attempt)
    return found


def test_one_tenant_alone_never_opens_it_with_what_it_sends() -> None:
    breaker = CircuitBreaker()
    doubt(breaker, "attacker", 200)
    assert not breaker.is_tripped(0.0)
    doubt(breaker, "other")  # that may happen
    doubt(breaker, "attacker", 200)
    assert not breaker.is_tripped(0.0)


def test_errors_of_several_tenants_open_it() -> None:
    breaker = CircuitBreaker()
    for source in ("a", "b", "c"):
        doubt(breaker, source)
    assert not breaker.is_tripped(0.0)
    doubt(breaker, "d")
    doubt(breaker, "e")
    assert breaker.is_tripped(0.0)


def test_errors_that_another_replica_did_not_make_open_it_for_one_tenant_too() -> None:
    breaker = CircuitBreaker()
    for attempt in doubt(breaker, "only", 5):
        attempt.proved(0.0)
    assert breaker.is_tripped(0.0)


def test_errors_by_chance_of_one_tenant_do_not_open_it_where_others_do_well() -> None:
    breaker = CircuitBreaker()
    for number in range(50):
        for attempt in doubt(breaker, "attacker", 3, now=number / 10):
            attempt.proved(number / 10)
        if number == 0:
            well = breaker.begin(0.0, "other")
            assert well is not None
            well.succeeded(0.0)
        assert not breaker.is_tripped(number / 10)


def test_a_trial_that_fails_by_what_was_asked_gives_its_place_back() -> None:
    breaker = CircuitBreaker()
    send(breaker, "-" * 5)
    doubt(breaker, "attacker", 20, now=5.0)
    send(breaker, "+++", now=5.0)
    assert breaker.state(5.0) is BreakerState.CLOSED


class BreakerMachine(RuleBasedStateMachine):
    """Never more trials than allowed, never stuck: when all have ended and time has passed, it lets one through."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = BreakerSettings(failures_in_a_row=3, least_requests=4, trials=2, successes_to_close=2)
        self.breaker = CircuitBreaker(self.settings)
        self.now = 0.0
        self.under_way: list[Attempt] = []
        self.trials: list[Attempt] = []

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin(self) -> None:
        state = self.breaker.state(self.now)
        is_tripped = self.breaker.is_tripped(self.now)
        attempt = self.breaker.begin(self.now)
        assert (attempt is None) == is_tripped
        assert (state is BreakerState.OPEN) <= is_tripped
        if attempt is not None:
            self.under_way.append(attempt)
            if state is BreakerState.HALF_OPEN:
                self.trials.append(attempt)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), outcome=st.sampled_from(["succeeded", "failed", "abandoned", "doubted"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        attempt = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        getattr(attempt, outcome)(self.now)
        getattr(attempt, outcome)(self.now)  # a second end changes nothing

    @invariant()
    def trials_are_few(self) -> None:
        if self.breaker.state(self.now) is BreakerState.HALF_OPEN:
            epoch = self.trials[-1].epoch if self.trials else -1
            open_trials = [t for t in self.trials if not t.is_over and t.epoch == epoch]
            assert len(open_trials) <= self.settings.trials

    def teardown(self) -> None:
        for attempt in self.under_way:
            attempt.abandoned(self.now)
        assert not self.breaker.is_tripped(self.now + self.settings.most_open_s)


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
