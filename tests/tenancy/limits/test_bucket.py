"""The bucket against its definition: the level is the least room of all windows, after any reserve, settle and wait."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.tenancy.limits.bucket import Bucket, Span
from tests.examples import examples

times = st.integers(0, 60)
sizes = st.integers(0, 60)


class BucketMachine(RuleBasedStateMachine):
    """Everything ever admitted is remembered, with the time and with what it counts for now."""

    @initialize(rate=st.integers(1, 5), capacity=st.integers(1, 40))
    def start(self, rate: int, capacity: int) -> None:
        self.now = 0
        self.bucket = Bucket(rate, capacity, now=0)
        self.history: list[list[int]] = []  # [time, effective cost]
        self.open: list[tuple[Span, list[int]]] = []
        self.largest_at_once = capacity

    @rule(elapsed=times)
    def wait(self, elapsed: int) -> None:
        self.now += elapsed
        self.bucket.refill(self.now)

    @rule(cost=sizes)
    def reserve(self, cost: int) -> None:
        if self.bucket.level < self.bucket.need(cost):
            return
        entry = [self.now, cost]
        self.history.append(entry)
        self.open.append((self.bucket.take(cost), entry))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        span, entry = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        used = data.draw(st.integers(0, entry[1]))
        self.bucket.close(span, entry[1] - used)
        entry[1] = used

    @precondition(lambda self: self.open)
    @rule()
    def expire_all(self) -> None:
        while self.open:
            span, entry = self.open.pop()
            self.bucket.close(span, entry[1])
            entry[1] = 0

    @invariant()
    def level_is_the_least_room_of_all_windows(self) -> None:
        bucket = self.bucket
        begins = {time for time, _ in self.history}
        admitted = {begin: sum(cost for time, cost in self.history if time >= begin) for begin in begins}
        rooms = [bucket.capacity + bucket.rate * (self.now - begin) - admitted[begin] for begin in begins]
        # Within one instant windows begin between two admissions too; the whole instant is the smallest of those.
        assert bucket.level == min([bucket.capacity, *rooms])

    @invariant()
    def no_window_holds_more_than_its_bound(self) -> None:
        moments = sorted({time for time, _ in self.history})
        for index, begin in enumerate(moments):
            for end in moments[index:]:
                inside = [cost for time, cost in self.history if begin <= time <= end]
                burst = max([self.bucket.capacity, *inside])
                assert sum(inside) <= self.bucket.rate * (end - begin) + burst


BucketMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestBucketAgainstItsDefinition = BucketMachine.TestCase


def test_a_refund_does_not_let_the_burst_be_taken_twice_at_one_instant() -> None:
    bucket = Bucket(rate=1, capacity=10, now=0)
    first = bucket.take(10)
    bucket.refill(5)
    bucket.take(5)
    bucket.close(first, unused=10)
    assert bucket.level == 5  # a plain min(capacity, level + refund) would be 10, and 15 would pass at time 5


def test_a_request_larger_than_the_burst_waits_for_a_full_bucket_and_leaves_a_debt() -> None:
    bucket = Bucket(rate=1, capacity=10, now=0, owed=1)
    assert bucket.level < bucket.need(25)
    bucket.refill(1)
    assert bucket.level >= bucket.need(25)
    span = bucket.take(25)
    assert bucket.level == -15
    bucket.close(span, unused=20)
    assert bucket.level == 5


@given(st.lists(st.tuples(sizes, st.booleans()), max_size=60), st.integers(1, 5))
def test_what_is_never_used_never_adds_up_to_more_than_the_bucket(takes: list[tuple[int, bool]], rate: int) -> None:
    bucket = Bucket(rate, capacity=30, now=0)
    open_spans = []
    for now, (cost, wait) in enumerate(takes):
        bucket.refill(now if wait else 0)
        if bucket.level >= bucket.need(cost):
            open_spans.append((bucket.take(cost), cost))
    for span, cost in open_spans:
        bucket.close(span, cost)
    assert bucket.level == bucket.capacity
    assert bucket.owed == 0


def test_using_more_than_was_reserved_is_owed() -> None:
    bucket = Bucket(rate=1, capacity=10, now=0)
    bucket.close(bucket.take(4), unused=-3)
    assert bucket.level == 3


@pytest.mark.parametrize("step", [-5, 0])
def test_a_clock_that_stands_or_steps_back_pours_nothing(step: int) -> None:
    bucket = Bucket(rate=1, capacity=10, now=100, owed=10)
    bucket.refill(100 + step)
    assert bucket.level == 0
