"""Windows against their definition: whatever is reserved and settled, no 60 seconds hold more than the limit."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.tenancy.limits.quota import MINUTE, NOBODY, US, Quota, Rate, Refusal
from penstock.tenancy.limits.tenant_limits import Reservation, TenantLimits
from penstock.tenancy.limits.window import SLOT
from tests.examples import examples

_waits = st.one_of(st.integers(0, 3 * SLOT), st.integers(0, 70 * US), st.sampled_from([SLOT, MINUTE, MINUTE - 1]))


class Windows(RuleBasedStateMachine):
    """Everything ever admitted is remembered, with its time and with what it counts for now."""

    @initialize(requests=st.integers(1, 12), tokens=st.integers(1, 100), smooth=st.booleans())
    def start(self, requests: int, tokens: int, smooth: bool) -> None:
        self.requests, self.tokens, self.smooth = requests, tokens, smooth
        self.now = 1_000 * US
        self.account = TenantLimits(Quota(Rate(requests, smooth), Rate(tokens, smooth)), self.now)
        self.history: list[list[int]] = []  # time, requests, tokens
        self.open: list[tuple[Reservation, list[int]]] = []
        self.num_callers = 0

    @rule(elapsed=_waits)
    def wait(self, elapsed: int) -> None:
        self.now += elapsed

    @rule(share=st.floats(0, 1.1), times=st.integers(1, 15), caller=st.integers(NOBODY, 5))
    def reserve(self, share: float, times: int, caller: int) -> None:
        tokens = int(share * self.tokens)
        for _ in range(times):
            was_empty = self.is_empty()
            answer = self.account.reserve(tokens, caller, self.now)
            if isinstance(answer, Refusal):
                assert tokens > self.tokens or not was_empty, "one request fits an empty window"
                continue
            entry = [self.now, 1, tokens]
            self.history.append(entry)
            self.open.append((answer, entry))

    def is_empty(self) -> bool:
        recent = any(at > self.now - MINUTE - SLOT for at, *_ in self.history)
        return not recent and not self.account._places.by_due

    @precondition(lambda self: self.open)
    @rule(data=st.data(), runs=st.booleans())
    def end(self, data: st.DataObject, runs: bool) -> None:
        held, entry = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if runs:
            entry[2] = data.draw(st.integers(0, held.tokens))
            self.account.settle(held, entry[2], self.now)
        else:
            entry[1:] = 0, 0
            self.account.release(held, self.now)

    @invariant()
    def no_window_holds_more_than_its_limit(self) -> None:
        for begin, *_ in self.history:
            inside = [entry for entry in self.history if begin <= entry[0] < begin + MINUTE]
            assert sum(requests for _, requests, _ in inside) <= self.requests
            assert sum(tokens for *_, tokens in inside) <= self.tokens

    @invariant()
    def counts_are_those_of_the_history(self) -> None:
        """Never less than was admitted in the last minute, and never more than a slot's worth above it."""
        self.account._advance(self.now)
        for window in self.account.windows:
            amounts = [(entry[0], entry[1 + window.kind]) for entry in self.history]
            inside = sum(amount for at, amount in amounts if at > self.now - MINUTE)
            with_slot = sum(amount for at, amount in amounts if at > self.now - MINUTE - SLOT)
            assert inside <= window.used <= with_slot


Windows.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=30)
TestWindowsAgainstTheirDefinition = Windows.TestCase


@given(limit=st.integers(1, 200), now=st.integers(0, 10**15), others=st.lists(st.integers(0, 30), max_size=5))
def test_the_whole_limit_is_admitted_at_once_into_an_empty_window(limit: int, now: int, others: list[int]) -> None:
    account = TenantLimits(Quota(Rate(limit), Rate(10 * limit)), now)
    for tokens in others:  # an earlier minute, with its refusals
        account.reserve(tokens, tokens, now)
    now += 3 * MINUTE
    assert all(isinstance(account.reserve(10, caller, now), Reservation) for caller in range(limit))
    assert isinstance(account.reserve(0, limit, now), Refusal)
    assert isinstance(account.reserve(0, NOBODY, now + MINUTE - 1), Refusal)
    later = TenantLimits(Quota(Rate(limit), Rate(10 * limit)), now, slots=account.slots)
    assert all(isinstance(later.reserve(10, caller, now + MINUTE), Reservation) for caller in range(limit))


def test_what_is_not_used_returns_to_the_slot_of_its_reservation() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), 0)
    first = account.reserve(100, NOBODY, 0)
    assert isinstance(first, Reservation)
    account.settle(first, 40, 30 * US)
    second = account.reserve(60, NOBODY, 30 * US)
    assert isinstance(second, Reservation)
    assert isinstance(account.reserve(41, NOBODY, MINUTE), Refusal)
    assert isinstance(account.reserve(40, NOBODY, MINUTE), Reservation), "the first has left the window, with its 40"
    account.settle(second, 0, MINUTE)
    assert isinstance(account.reserve(60, NOBODY, MINUTE), Reservation)


def test_a_refund_after_its_slot_has_left_gives_nothing() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), 0)
    first = account.reserve(100, NOBODY, 0)
    assert isinstance(first, Reservation)
    assert isinstance(account.reserve(100, NOBODY, MINUTE), Reservation)
    account.settle(first, 0, MINUTE)
    assert isinstance(account.reserve(1, NOBODY, MINUTE), Refusal)


def test_the_oldest_slot_counts_whole_until_its_newest_admission_has_left() -> None:
    account = TenantLimits(Quota(requests=Rate(2)), 0)
    account.reserve(1, NOBODY, 0)
    account.reserve(1, NOBODY, SLOT - 1)
    assert isinstance(account.reserve(1, NOBODY, MINUTE), Refusal)
    assert isinstance(account.reserve(1, NOBODY, MINUTE + SLOT - 1), Reservation)


def test_using_more_than_was_reserved_counts_from_when_it_is_known() -> None:
    account = TenantLimits(Quota(tokens=Rate(100)), 0)
    held = account.reserve(40, NOBODY, 0)
    assert isinstance(held, Reservation)
    account.settle(held, 90, 50 * US)
    assert isinstance(account.reserve(60, NOBODY, MINUTE), Refusal)
    assert isinstance(account.reserve(50, NOBODY, MINUTE), Reservation)


@pytest.mark.parametrize("step", [-5 * US, 0])
def test_a_clock_that_stands_or_steps_back_frees_nothing(step: int) -> None:
    account = TenantLimits(Quota(requests=Rate(1)), 100 * US)
    account.reserve(1, NOBODY, 100 * US)
    assert isinstance(account.reserve(1, NOBODY, 100 * US + step), Refusal)
    assert isinstance(account.reserve(1, NOBODY, 160 * US), Reservation)


@given(st.lists(st.tuples(st.integers(0, 3 * US), st.integers(0, 20)), max_size=80), st.integers(6, 90))
def test_a_smooth_rate_spreads_the_limit_over_the_minute(asks: list[tuple[int, int]], limit: int) -> None:
    account, now = TenantLimits(Quota(tokens=Rate(limit, smooth=True)), 0), 0
    admitted: list[tuple[int, int]] = []
    for elapsed, tokens in asks:
        now += elapsed
        if isinstance(account.reserve(tokens, NOBODY, now), Reservation):
            admitted.append((now, tokens))
    for begin, _ in admitted:
        for end, _ in admitted:
            inside = [tokens for at, tokens in admitted if begin <= at <= end]
            assert (
                sum(inside, 0) * MINUTE
                <= limit * (end - begin) + max(10 * US * limit, *(t * MINUTE for t in inside), 0)
                or end < begin
            )


def test_a_smooth_rate_lets_a_sixth_come_at_once_and_a_large_request_wait_for_it() -> None:
    account = TenantLimits(Quota(tokens=Rate(60, smooth=True)), 0)
    assert isinstance(account.reserve(10, NOBODY, 0), Reservation)
    refused = account.reserve(5, NOBODY, 0)
    assert isinstance(refused, Refusal)
    assert refused.is_paced
    assert isinstance(account.reserve(5, NOBODY, 5 * US), Reservation)
    assert isinstance(account.reserve(30, NOBODY, 14 * US), Refusal)
    assert isinstance(account.reserve(30, NOBODY, 15 * US), Reservation)
    assert isinstance(account.reserve(1, NOBODY, 35 * US), Refusal), "it has left a debt"
    assert isinstance(account.reserve(1, NOBODY, 36 * US), Reservation)
