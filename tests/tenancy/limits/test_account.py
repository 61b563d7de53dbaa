"""One tenant: limits taken together, times that hold, and no rate lost to callers that never come back."""

import heapq
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.tenancy.limits.places import EARLY
from penstock.tenancy.limits.quota import MINUTE, NOBODY, US, Quota, Rate, Reason, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation, TenantLimits
from tests.examples import examples
from tests.tenancy.limits.windows import Admission, fullest_window

GRACE_US = 2 * US


class PoliteCallers(RuleBasedStateMachine):
    """Refused callers come back at the told time or within the grace; others push in, settle and go at will."""

    @initialize(requests=st.integers(1, 200), tokens=st.integers(60, 3000), smooth=st.booleans())
    def start(self, requests: int, tokens: int, smooth: bool) -> None:
        self.quota = Quota(Rate(requests, smooth), Rate(tokens, smooth))
        self.now = 0
        self.account = TenantLimits(self.quota, now=0)
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
            is_promise = any(place.caller == caller for place in self.account._places.by_due)
            if is_promise:
                assert answer.retry_after_s is not None
                again = self.account.reserve(tokens, caller, self.now)
                assert isinstance(again, Refusal), "nothing has happened since"
                assert again.retry_after_s == answer.retry_after_s, "a retry does not push its own promise back"
            if returns and is_promise and answer.retry_after_s is not None:
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


PoliteCallers.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestRetryAfterAlwaysHolds = PoliteCallers.TestCase


class Crowd:
    """64 callers of one tenant that always want more, in simulated time."""

    def __init__(self, seed: int, quota: Quota, manners: str) -> None:
        self.random = random.Random(seed)
        self.quota = quota
        self.manners = manners
        self.account = TenantLimits(quota, now=0)
        self.admitted: list[tuple[int, int]] = []

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
            heapq.heappush(events, (self.comes_back(now, answer), next(order), "ask", None, caller, tokens))

    def size(self) -> int:
        assert self.quota.tokens is not None
        return self.random.randint(1, self.quota.tokens.per_minute // 20)

    def comes_back(self, now: int, refusal: Refusal) -> int:
        assert refusal.retry_after_s is not None
        told = now + round(refusal.retry_after_s * US)
        if self.manners == "pushing":
            return now + self.random.randint(1, US // 2)
        return told + self.random.randint(0, US // 5)

    def share_used(self, seconds: int) -> float:
        assert self.quota.tokens is not None
        return sum(used for _, used in self.admitted) / (self.quota.tokens.per_minute * seconds / 60)


@pytest.mark.parametrize(
    ("manners", "seed", "seconds", "smooth"),
    [
        ("polite", 1, 300, False),
        ("polite", 2, 300, True),
        pytest.param("pushing", 3, 130, False, marks=pytest.mark.slow),
    ],
)
def test_64_greedy_callers_get_the_limit_and_no_window_gets_more(
    manners: str, seed: int, seconds: int, smooth: bool
) -> None:
    crowd = Crowd(seed, Quota(Rate(6000, smooth), Rate(20_000, smooth), concurrency=64), manners)
    crowd.run(seconds)
    assert crowd.share_used(seconds) >= (0.9 if smooth else 0.95)
    admissions = [Admission(at / US, at / US, used) for at, used in crowd.admitted]
    assert fullest_window(admissions) <= 20_000


def test_a_thousand_refused_callers_that_never_return_cost_the_grace_and_no_more() -> None:
    account = TenantLimits(Quota(tokens=Rate(6000)), now=0)
    for caller in range(1000):
        account.reserve(100, caller, 0)
    got, now = 0, 0
    while now < 5 * MINUTE:
        now += US // 20
        answer = account.reserve(100, 5000, now)
        if isinstance(answer, Reservation):
            got += 100
            account.settle(answer, 100, now)
    assert got == 4 * 6000  # the first minute was the others'


def test_a_stream_of_callers_that_never_return_gets_the_limit() -> None:
    """Each asks once. The room that is kept for those who were refused goes to whoever asks after their grace."""
    account, admitted = TenantLimits(Quota(requests=Rate(60)), now=0), 0
    for caller in range(30 * 60):  # three each second, for ten minutes
        admitted += isinstance(account.reserve(1, caller, caller * US // 3), Reservation)
    assert admitted >= 0.95 * 600


def test_all_limits_are_taken_together_or_not_at_all() -> None:
    account = TenantLimits(Quota(Rate(1), Rate(6000), concurrency=5), now=0)
    assert isinstance(account.reserve(10, 0, 0), Reservation)
    refused = account.reserve(10, 1, 0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.REQUESTS
    assert account.in_use == 1
    assert [window.used for window in account.windows] == [1, 10]


def test_a_request_above_the_limit_is_refused_for_ever() -> None:
    account = TenantLimits(Quota(tokens=Rate(600)), now=0)
    assert account.reserve(601, 0, 0) == Refusal(Reason.TOO_LARGE, None, limit=600)
    assert isinstance(account.reserve(600, 0, 0), Reservation)


def test_nothing_is_kept_for_one_that_will_not_come_back() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), now=0)
    assert account.reserve(60, 0, 0)
    refused = account.reserve(90, NOBODY, 0)
    assert refused == Refusal(Reason.TOKENS, None, limit=100, used=60)
    assert isinstance(account.reserve(40, 1, 0), Reservation)  # as if nobody had asked


def test_one_request_a_minute_is_one_request_a_minute() -> None:
    account = TenantLimits(Quota(requests=Rate(1)), now=0)
    admitted = [s for s in range(600) if isinstance(account.reserve(5, 0, s * US), Reservation)]
    assert admitted == [*range(0, 600, 60)]


def test_retries_of_one_request_are_told_the_same_time_and_it_is_when_the_window_has_room() -> None:
    account = TenantLimits(Quota(requests=Rate(3)), now=0)
    for second in (0, 1, 2):
        assert isinstance(account.reserve(1, second, second * US), Reservation)
    for second in (3, 10, 25, 59):
        refused = account.reserve(1, 7, second * US)
        assert isinstance(refused, Refusal)
        assert refused.retry_after_s == 60 - second
        assert (refused.limit, refused.used) == (3, 3)
    assert isinstance(account.reserve(1, 7, 60 * US), Reservation)


def test_others_are_told_the_times_at_which_there_is_room_for_them() -> None:
    account = TenantLimits(Quota(requests=Rate(3)), now=0)
    for second in (0, 1, 2):
        account.reserve(1, second, second * US)
    told = [account.reserve(1, caller, 3 * US) for caller in range(10, 14)]
    waits = [refused.retry_after_s for refused in told if isinstance(refused, Refusal)]
    assert waits[:3] == [57, 58, 59]
    assert waits[3] is not None
    assert 117 <= waits[3] <= 120, "when the first of those three has left the window again"


def test_a_request_may_go_before_larger_ones_where_it_delays_nobody() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), now=0)
    account.reserve(60, 0, 0)
    assert isinstance(account.reserve(90, 1, US), Refusal)
    assert isinstance(account.reserve(40, 2, US), Refusal), "there is room, and it is kept"
    assert isinstance(account.reserve(10, 3, US), Reservation)
    assert isinstance(account.reserve(90, 1, 60 * US), Reservation)


def test_what_a_refused_caller_waited_for_is_not_taken_by_newcomers() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), now=0)
    account.reserve(100, 0, 0)
    assert isinstance(account.reserve(50, 1, US), Refusal)
    refused = account.reserve(60, 2, 60 * US)
    assert isinstance(refused, Refusal)
    assert (refused.used, refused.kept) == (0, 50)
    assert isinstance(account.reserve(50, 1, 61 * US), Reservation)
    assert isinstance(account.reserve(60, NOBODY, 62 * US), Refusal)
    assert isinstance(account.reserve(50, NOBODY, 62 * US), Reservation)


def test_who_comes_a_moment_early_is_told_to_wait_for_the_rest() -> None:
    account = TenantLimits(Quota(requests=Rate(1)), now=0)
    account.reserve(1, 1, 0)
    assert isinstance(account.reserve(1, 2, US), Refusal)
    early = account.reserve(1, 2, MINUTE - EARLY)
    assert isinstance(early, Refusal)
    assert early.is_due
    assert isinstance(account.reserve(1, 2, MINUTE), Reservation)


def test_a_large_body_that_knocks_first_keeps_the_place_for_its_tokens() -> None:
    account = TenantLimits(Quota(Rate(10), Rate(100)), now=0)
    account.reserve(100, 1, 0)
    assert isinstance(account.reserve(80, 2, 0), Refusal)
    knock = account.reserve(0, 2, MINUTE)
    assert isinstance(knock, Reservation)
    account.release(knock, MINUTE)
    assert isinstance(account.reserve(80, 3, MINUTE), Refusal)
    assert isinstance(account.reserve(80, 2, MINUTE), Reservation)


def test_a_slot_that_is_free_goes_to_who_was_told_and_came() -> None:
    account = TenantLimits(Quota(concurrency=1), now=0)
    first = account.reserve(1, 1, 0)
    assert isinstance(first, Reservation)
    refused = account.reserve(1, 2, 0)
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.CONCURRENCY
    assert (refused.limit, refused.used) == (1, 1)
    told = round((refused.retry_after_s or 0) * US)
    again = account.reserve(1, 2, told)
    assert isinstance(again, Refusal)
    assert again.is_due
    account.settle(first, 1, told + 1)
    assert isinstance(account.reserve(1, 3, told + 2), Refusal), "a newcomer stands behind"
    assert isinstance(account.reserve(1, 2, told + 3), Reservation)


def test_settling_twice_and_releasing_after_settling_do_nothing() -> None:
    account = TenantLimits(Quota(Rate(60), Rate(600), 4), now=0)
    held = account.reserve(100, 0, 0)
    assert isinstance(held, Reservation)
    account.settle(held, 40, 0)
    account.settle(held, 0, 0)
    account.release(held, 0)
    assert account.in_use == 0
    assert [window.used for window in account.windows] == [1, 40]


def test_limits_that_change_keep_what_is_used_and_what_is_open() -> None:
    account = TenantLimits(Quota(tokens=Rate(600)), now=0)
    held = account.reserve(100, 0, 0)
    assert isinstance(held, Reservation)
    account.change(Quota(Rate(60), Rate(1200, smooth=True), 3), now=0)
    assert account.in_use == 1
    assert [window.used for window in account.windows] == [1, 100]
    assert isinstance(account.reserve(101, NOBODY, 0), Refusal), "a sixth of the new limit at once"
    account.settle(held, 70, 10 * US)
    assert [window.used for window in account.windows] == [1, 70]
    assert account.is_idle(60 * US)
