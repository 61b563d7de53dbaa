"""Who gets how many drafts, on a machine whose steps take what they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from penstock.core.request import Request
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import Sampled, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.draft_budget import capped, gain, worthwhile
from penstock.sched.speculation.drafting import Drafts
from penstock.sched.speculation.speculation import Speculation
from penstock.sched.speculation.step_costs import StepCosts

MOST = 8


class Guesser:
    """Has drafts for everybody, all of one kind."""

    is_settled = is_steadfast = True

    def __init__(self) -> None:
        self.looks = 0
        self.only: str | None = None

    def look(self, sequence: LiveSequence) -> int | None:
        self.looks += 1
        return 0 if self.only in (None, sequence.request.id) else None

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        return [[1] * count for _, count in wanted]


class Machine:
    """Steps take `base_s`, and `draft_s` for every draft; of every sequence's drafts the first ones hold."""

    def __init__(self, batch: int, base_s: float, draft_s: float, held: Callable[[int], int]) -> None:
        self.base_s, self.draft_s, self.held = base_s, draft_s, held
        self.guesser = Guesser()
        self.costs = StepCosts()
        self.speculation = Speculation(self.guesser, MOST, self.costs)
        cache = KVCache(4096, 16)
        self.scheduler = Scheduler(cache, StepBudget(4096, target_s=None, floor=16), max_num_seqs=256)
        for number in range(batch):
            self.scheduler.submit(Request(f"r{number}", [number, 5], 60_000 // batch), 0.0)
        self.seconds = 0.0
        self.num_drafts: list[int] = []

    def step(self) -> Drafts:
        drafts = self.speculation.drafts(self.scheduler.decoding)
        plan = self.scheduler.plan(self.seconds, drafts)
        assert plan is not None
        result = StepResult([Sampled([1] * (1 + min(self.held(len(s.ahead)), len(s.ahead)))) for s in plan.slices])
        count = sum(len(s.ahead) for s in plan.slices)
        self.seconds += self.base_s + count * self.draft_s
        self.speculation.observe(plan, result, self.base_s + count * self.draft_s)
        self.scheduler.commit(plan, result, self.seconds)
        self.num_drafts.append(count)
        return drafts

    def run(self, num_steps: int) -> list[int]:
        self.num_drafts = []
        for _ in range(num_steps):
            self.step()
        return self.num_drafts


def test_one_sequence_whose_drafts_hold_gets_as_many_as_it_may() -> None:
    machine = Machine(1, 0.010, 0.0005, held=lambda count: count)
    assert set(machine.run(60)[20:]) <= {MOST, 0}
    assert machine.num_drafts[20:].count(0) <= 2  # now and then it is looked at what a step takes without


def test_drafts_that_never_hold_are_given_up_and_tried_again() -> None:
    machine = Machine(1, 0.010, 0.001, held=lambda count: 0)
    machine.run(100)
    later = machine.run(1000)
    assert 0 < sum(count > 0 for count in later) < 100
    assert sum(later) * 0.001 < 0.02 * 1000 * 0.010


def test_where_every_row_costs_what_it_brings_nobody_gets_any() -> None:
    machine = Machine(32, 0.064, 0.002, held=lambda count: count)
    machine.run(50)
    before_s, looks = machine.seconds, machine.guesser.looks
    later = machine.run(1000)
    plain_s = 1000 * 0.064
    assert machine.seconds - before_s < 1.01 * plain_s
    assert any(later)  # it is measured again, but rarely
    assert machine.guesser.looks - looks < 32 * 1000 / 20


def test_when_a_draft_becomes_cheap_that_is_found_out() -> None:
    machine = Machine(8, 0.064, 0.008, held=lambda count: count)
    machine.run(200)
    machine.draft_s = 0.0005
    machine.run(300)
    assert sum(machine.run(100)) > 100 * MOST * 4


def test_when_the_device_becomes_busy_drafts_end() -> None:
    machine = Machine(4, 0.040, 0.001, held=lambda count: min(count, 1))
    assert sum(machine.run(100)) > 0
    machine.draft_s = 0.040
    machine.run(60)
    assert sum(count > 0 for count in machine.run(400)) <= 8


def test_the_one_whose_drafts_hold_gets_more_than_its_neighbour() -> None:
    machine = Machine(2, 0.010, 0.002, held=lambda count: 0)
    for _ in range(80):
        drafts = machine.speculation.drafts(machine.scheduler.decoding)
        plan = machine.scheduler.plan(0.0, drafts)
        assert plan is not None
        kept = [len(s.ahead) if s.request_id == "r0" else 0 for s in plan.slices]
        result = StepResult([Sampled([1] * (1 + count)) for count in kept])
        machine.speculation.observe(plan, result, 0.010 + 0.002 * sum(len(s.ahead) for s in plan.slices))
        machine.scheduler.commit(plan, result, 0.0)
    counts = {"r0": 0, "r1": 0}
    for _ in range(20):
        for name, draft in machine.step().items():
            counts[name] += len(draft)
    assert counts["r0"] > 4 * counts["r1"]


def test_nobody_is_slowed_down_much_by_what_another_gains() -> None:
    """One of eight has drafts, and all of them hold; the other seven would pay for them."""
    machine = Machine(8, 0.040, 0.002, held=lambda count: count)
    machine.guesser.only = "r3"
    machine.run(20)
    assert 3 <= max(machine.run(100)) <= 4  # a fifth of a step; by itself it would get as many as it may
    machine.guesser.only = None
    machine.run(100)
    assert max(machine.run(50)) > 8 * 4


def test_a_cap_takes_from_those_who_have_many() -> None:
    assert capped([8, 1, 3], 7) == [3, 1, 3]
    assert capped([8, 1, 3], 20) == [8, 1, 3]
    assert capped([2, 2, 2], 2) == [0, 0, 0]
    assert capped([], 3) == []


def test_a_step_with_a_prompt_in_it_says_nothing_of_drafts() -> None:
    machine = Machine(1, 0.010, 0.001, held=lambda count: count)
    machine.run(40)
    known = dict(machine.costs._drafts)
    plan = StepPlan([])
    machine.scheduler.submit(Request("prompt", [9] * 40, 5), 0.0)
    plan = machine.scheduler.plan(0.0, machine.speculation.drafts(machine.scheduler.decoding)) or plan
    assert not any(s.ahead for s in plan.slices)
    machine.speculation.observe(plan, StepResult([Sampled([1]) for _ in plan.slices]), 5.0)
    assert machine.costs._drafts == known
    assert machine.costs.threshold(2) == 1.0


@pytest.mark.parametrize(
    ("chance", "threshold", "expected"), [(0.9, 0.5, 6), (0.5, 0.6, 0), (1.0, 0.9, 8), (0.3, 0.0, 8)]
)
def test_drafts_go_on_while_the_next_is_worth_its_cost(chance: float, threshold: float, expected: int) -> None:
    assert worthwhile(chance, threshold, MOST) == expected


def test_what_drafts_bring_is_the_sum_of_their_chances() -> None:
    assert gain(0.5, 3) == pytest.approx(0.5 + 0.25 + 0.125)
    assert gain(1.0, 3) == 3
    assert gain(0.5, 0) == 0
