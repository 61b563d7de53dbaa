"""One tenant: limits taken together, times that hold, and no rate lost to callers that never come back."""

import heapq
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.tenancy.limits.account import Account, Reservation
from penstock.tenancy.limits.quota import NOBODY, US, Quota, Rate, Reason, Refusal
from tests.examples import examples
from tests.tenancy.limits.windows import Admission, worst_excess

GRACE_US = 2 * US


class PoliteCallers(RuleBasedStateMachine):
    """Refused callers come back at the told time or within the grace; others push in, settle and go at will."""

    @initialize(requests=st.integers(1, 200), tokens=st.integers(60, 3000))
    def start(self, requests: int, tokens: int) -> None:
        self.quota = Quota(Rate(requests), Rate(tokens))
        self.now = 0
        self.account = Account(self.quota, now=0)
        self.open: list[Reservation] = []
        self.waiting: list[tuple[int, int, int]] = []  # when to come back, caller, tokens
        self.callers = itertools.count(1)

    def ask(self, tokens: int, caller: int) -> Reservation | Refusal:
        answer = self.account.reserve(tokens, caller, self.now)
        if isinstance(answer, Reservation):
            self.open.append(answer)
        return answer

    @rule(share=st.floats(0, 1.05), late=st.integers(0, GRACE_US), returns=st.booleans())
    def newcomer(self, share: float, late: int, returns: bool) -> None:
        assert self.quota.tokens is not None
        tokens, caller = int(share * self.quota.tokens.per_minute), next(self.callers)
        answer = self.ask(tokens, caller)
        if isinstance(answer, Refusal):
            assert (answer.retry_after_s is None) == (tokens > self.quota.tokens.per_minute)
            if returns and answer.retry_after_s is not None:
                heapq.heappush(self.waiting, (self.now + round(answer.retry_after_s * US) + late, caller, tokens))

    @rule(share=st.floats(0, 0.05), how_many=st.integers(1, 30))
    def crowd(self, share: float, how_many: int) -> None:
        for _ in range(how_many):
            self.newcomer(share, late=0, returns=True)

    @rule(elapsed=st.integers(0, 40 * US))
    def wait(self, elapsed: int) -> None:
        until = self.now + elapsed
        while self.waiting and self.waiting[0][0] <= until:
            self.now, caller, tokens = heapq.heappop(self.waiting)
            assert isinstance(self.ask(tokens, caller), Reservation), "it came back at the told time"
        self.now = until

    @precondition(lambda self: self.open)
    @rule(data=st.data(), runs=st.booleans())
    def end(self, data: st.DataObject, runs: bool) -> None:
        held = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if runs:
            self.account.settle(held, data.draw(st.integers(0, held.tokens)), self.now)
        else:
            self.account.release(held, self.now)


PoliteCallers.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestRetryAfterAlwaysHolds = PoliteCallers.TestCase


class Crowd:
    """64 callers of one tenant that always want more, in simulated time."""

    def __init__(self, seed: int, quota: Quota, manners: str) -> None:
        self.random = random.Random(seed)
        self.quota = quota
        self.manners = manners
        self.account = Account(quota, now=0)
        self.admitted: list[tuple[int, int]] = []
        self.broken_promises = 0

    def run(self, seconds: int, callers: int = 64) -> None:
        order = itertools.count()
        events: list[tuple[int, int, str, object, int, int]] = []  # time, order, what, reservation, caller, tokens
        for caller in range(callers):
            heapq.heappush(events, (caller, next(order), "ask", None, caller, self.size()))
        while events[0][0] < seconds * US:
            now, _, what, held, caller, tokens = heapq.heappop(events)
            if what == "end":
                assert isinstance(held, Reservation)
                used = self.random.randint(tokens // 10, tokens)
                self.account.settle(held, used, now)
                self.admitted.append((held.admitted, used))
                heapq.heappush(events, (now, next(order), "ask", None, caller, self.size()))
                continue
            answer = self.account.reserve(tokens, caller, now)
            if isinstance(answer, Reservation):
                ends = now + self.random.randint(US // 100, 5 * US)
                heapq.heappush(events, (ends, next(order), "end", answer, caller, tokens))
                continue
            self.broken_promises += what == "back"
            heapq.heappush(events, (self.comes_back(now, answer), next(order), self.what(), None, caller, tokens))

    def size(self) -> int:
        assert self.quota.tokens is not None
        return self.random.randint(1, self.quota.tokens.per_minute // 20)

    def what(self) -> str:
        return "ask" if self.manners == "pushing" else "back"

    def comes_back(self, now: int, refusal: Refusal) -> int:
        assert refusal.retry_after_s is not None
        told = now + round(refusal.retry_after_s * US)
        if self.manners == "pushing":
            return now + self.random.randint(1, US // 10)
        return told + self.random.randint(0, US // 5)

    def share_used(self, seconds: int) -> float:
        assert self.quota.tokens is not None
        return sum(used for _, used in self.admitted) / (self.quota.tokens.per_minute * seconds / 60)


@pytest.mark.parametrize(
    ("manners", "seed", "seconds"),
    [("polite", 1, 300), ("polite", 2, 300), pytest.param("pushing", 3, 100, marks=pytest.mark.slow)],
)
def test_64_greedy_callers_get_the_rate_and_no_window_gets_more(manners: str, seed: int, seconds: int) -> None:
    rate = Rate(20_000)
    crowd = Crowd(seed, Quota(Rate(6000), rate, concurrency=64), manners)
    crowd.run(seconds)
    assert crowd.share_used(seconds) >= 0.95
    assert crowd.broken_promises == 0
    admissions = [Admission(at / US, at / US, used) for at, used in crowd.admitted]
    assert worst_excess(admissions, 20_000 / 60, 20_000 / 6) <= 1e-6


def test_a_thousand_refused_callers_that_never_return_cost_no_rate() -> None:
    account = Account(Quota(tokens=Rate(6000)), now=0)
    for caller in range(1000):
        account.reserve(100, caller, 0)
    got, now = 0, 0
    while now < 300 * US:
        now += US // 20
        answer = account.reserve(100, 5000, now)
        if isinstance(answer, Reservation):
            got += 100
            account.settle(answer, 100, now)
    assert got >= 0.95 * 6000 * 5


def test_all_limits_are_taken_together_or_not_at_all() -> None:
    account = Account(Quota(Rate(6), Rate(6000), concurrency=5), now=0)
    assert isinstance(account.reserve(10, 0, 0), Reservation)
    refused = account.reserve(10, 1, 0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.REQUESTS
    assert account.in_use == 1
    assert account.tokens is not None
    assert account.tokens.owed == 10 * 60 * US


def test_a_request_above_a_minutes_worth_is_refused_for_ever() -> None:
    account = Account(Quota(tokens=Rate(600)), now=0)
    assert account.reserve(601, 0, 0) == Refusal(Reason.TOO_LARGE, None)
    assert isinstance(account.reserve(600, 0, 0), Reservation)


def test_nothing_is_kept_for_one_that_will_not_come_back() -> None:
    account = Account(Quota(tokens=Rate(600)), now=0)
    assert account.reserve(60, 0, 0)
    assert account.reserve(90, NOBODY, 0) == Refusal(Reason.TOKENS, None)
    assert isinstance(account.reserve(40, 1, 0), Reservation)  # as if nobody had asked


def test_one_request_a_minute_is_one_request_a_minute() -> None:
    """Not one request fits the burst, so each needs a full bucket; the grace of the place before may delay it."""
    account = Account(Quota(requests=Rate(1)), now=0)
    admitted = [s for s in range(600) if isinstance(account.reserve(5, 0, s * US), Reservation)]
    assert all(60 <= later - earlier <= 63 for earlier, later in itertools.pairwise(admitted))


def test_a_slot_that_is_free_goes_to_who_was_told_and_came() -> None:
    account = Account(Quota(concurrency=1), now=0)
    first = account.reserve(1, 1, 0)
    assert isinstance(first, Reservation)
    refused = account.reserve(1, 2, 0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.CONCURRENCY
    told = round((refused.retry_after_s or 0) * US)
    again = account.reserve(1, 2, told)
    assert isinstance(again, Refusal)
    assert again.is_due
    account.settle(first, 1, told + 1)
    assert isinstance(account.reserve(1, 3, told + 2), Refusal), "a newcomer stands behind"
    assert isinstance(account.reserve(1, 2, told + 3), Reservation)


def test_an_early_caller_waits_for_its_own_time_and_a_first_try_claims_nothing() -> None:
    account = Account(Quota(tokens=Rate(600)), now=0)
    account.reserve(100, 1, 0)
    refused = account.reserve(49, 7, 0)
    assert isinstance(refused, Refusal)
    assert refused.retry_after_s == 5.0
    assert isinstance(account.reserve(49, 7, 4 * US), Refusal)
    assert isinstance(account.reserve(49, 7, 5 * US), Reservation)


def test_what_spilled_after_a_place_ran_out_is_not_given_to_a_newcomer() -> None:
    """Two requests a minute, none of which fits the burst; the second place must find a full bucket at its time."""
    account = Account(Quota(requests=Rate(2), tokens=Rate(60)), now=0)
    account.reserve(52, 1, 0)
    account.reserve(30, 2, 37 * US)  # its place is never claimed
    refused = account.reserve(0, 3, 37 * US)
    assert isinstance(refused, Refusal)
    assert isinstance(account.reserve(0, 4, 77 * US), Refusal)
    told = 37 * US + round((refused.retry_after_s or 0) * US)
    assert isinstance(account.reserve(0, 3, told), Reservation)


def test_settling_twice_and_releasing_after_settling_do_nothing() -> None:
    account = Account(Quota(Rate(60), Rate(600), 4), now=0)
    held = account.reserve(100, 0, 0)
    assert isinstance(held, Reservation)
    account.settle(held, 40, 0)
    account.settle(held, 0, 0)
    account.release(held, 0)
    assert account.in_use == 0
    assert account.tokens is not None
    assert account.tokens.owed == 40 * 60 * US


def test_limits_that_change_keep_what_is_owed_and_what_is_open() -> None:
    account = Account(Quota(tokens=Rate(600)), now=0)
    held = account.reserve(100, 0, 0)
    assert isinstance(held, Reservation)
    account.change(Quota(Rate(60), Rate(1200), 3), now=0)
    assert account.in_use == 1
    assert account.tokens is not None
    assert account.tokens.owed == 100 * 60 * US
    account.settle(held, 100, 10 * US)
    assert account.is_idle(20 * US)
