"""Streams that lost their replica go before new requests, together, in full steps; and for a bounded time."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.request import Priority
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from tests.examples import examples
from tests.sched.test_scheduler import BLOCK, Bench, expected

CHUNK, FLOOR = 64, 8


class Sibling(Bench):
    """A replica that keeps streams of its own so busy that its time per token leaves prompts the least there is."""

    def __init__(self, num_own: int = 12, num_blocks: int = 2048) -> None:
        super().__init__(num_blocks, CHUNK, max_num_seqs=CHUNK)
        self.scheduler = Scheduler(
            KVCache(num_blocks, BLOCK), StepBudget(CHUNK, target_s=0.001, floor=FLOOR), max_num_seqs=256
        )
        for i in range(num_own):
            self.submit(f"own{i}", [900 + i], max_tokens=1000)
        for _ in range(8):
            self.step()
        assert self.scheduler.budget.tokens == (FLOOR if num_own else CHUNK)

    def step(self) -> StepPlan | None:
        plan = super().step()
        if plan is not None:  # no step can be that fast
            decodes = sum(planned.num_tokens == 1 for planned in plan.slices)
            self.scheduler.budget.observe(plan.num_tokens, decodes, 0.01)
        return plan

    def resume(self, name: str, prompt: list[int], num_made: int, **options: object) -> None:
        made = expected(prompt, num_made)
        self.submit(name, prompt, num_made + 4, output_ids=made, is_resumed=True, **options)

    def until_begun(self, kind: str, count: int) -> list[StepPlan]:
        """Steps until so many requests of a kind have their first token."""
        plans: list[StepPlan] = []
        while sum(bool(tokens) for name, tokens in self.outputs.items() if name.startswith(kind)) < count:
            plan = self.step()
            assert plan is not None
            plans.append(plan)
        return plans


def prompts_in(plan: StepPlan, kind: str) -> list[str]:
    """Requests of a kind that the step computes more of than a token."""
    return [s.request_id for s in plan.slices if s.num_tokens > 1 and s.request_id.startswith(kind)]


def test_of_36_resumed_and_36_new_requests_every_resumed_one_has_its_token_before_a_new_one_starts() -> None:
    sibling, num_tokens = Sibling(), 0
    for i in range(36):
        sibling.submit(f"new{i}", [i, *range(100, 120)])
    for i in range(36):
        prompt = [500 + i, *range(100, 110)]
        sibling.resume(f"old{i}", prompt, num_made=1 + i % 8)
        num_tokens += len(prompt) + 1 + i % 8
    plans = sibling.until_begun("old", 36)
    for plan in plans[:-1]:
        assert not prompts_in(plan, "new")
        assert plan.num_tokens == CHUNK, "a step that resumed streams could have filled is not full"
    num_decodes = sum(len(plan.slices) - len(prompts_in(plan, "")) for plan in plans)
    assert len(plans) <= -(-(num_tokens + num_decodes) // CHUNK)
    for i in range(36):
        prompt, num_made = [500 + i, *range(100, 110)], 1 + i % 8
        made_here = sibling.outputs[f"old{i}"]
        assert made_here == expected(prompt, num_made + 4)[num_made:][: len(made_here)]


def test_the_streams_beside_them_get_a_token_in_every_step() -> None:
    sibling = Sibling(num_own=12)
    for i in range(20):
        sibling.resume(f"old{i}", [500 + i, *range(100, 120)], num_made=5)
    for plan in sibling.until_begun("old", 20):
        assert {f"own{i}" for i in range(12)} <= {s.request_id for s in plan.slices}


def test_new_prompts_have_no_larger_part_of_a_step_for_their_sake() -> None:
    sibling = Sibling()
    for i in range(4):
        sibling.submit(f"new{i}", [i, *range(100, 140)])
    sibling.resume("old", [500, 501, 502], num_made=1)
    sibling.now += 1.0  # they are overdue, and get what a prompt gets at least
    plan = sibling.step()
    assert plan is not None
    assert prompts_in(plan, "old") == ["old"]
    assert sum(s.num_tokens for s in plan.slices if s.request_id.startswith("new")) == FLOOR - 4


def test_a_prompt_under_way_waits_for_resumed_streams() -> None:
    sibling = Sibling()
    sibling.submit("new", list(range(200)))
    sibling.now += 1.0
    assert prompts_in(sibling.step() or StepPlan([]), "new")
    for i in range(8):
        sibling.resume(f"old{i}", [500 + i, *range(100, 120)], num_made=5)
    plans = sibling.until_begun("old", 8)
    assert not any(prompts_in(plan, "new") for plan in plans[:-1])


def test_a_prefix_that_resumed_streams_share_is_computed_once() -> None:
    sibling, shared = Sibling(), list(range(100, 180))
    for i in range(12):
        sibling.submit(f"new{i}", [i, *range(100, 120)])
    for i in range(12):
        sibling.resume(f"old{i}", [*shared, 500 + i], num_made=3)
    plans = sibling.until_begun("old", 12)
    assert not any(prompts_in(plan, "new") for plan in plans[:-1])
    computed = sum(s.num_tokens for plan in plans for s in plan.slices if s.num_tokens > 1)
    assert computed <= len(shared) + 12 * (1 + 3 + BLOCK) + FLOOR
    assert len(plans) <= 4


def test_the_shortest_of_them_go_first() -> None:
    sibling = Sibling()
    sibling.resume("old long", [500, *range(100, 300)], num_made=50)
    for i in range(4):
        sibling.resume(f"old{i}", [501 + i, 100, 101], num_made=2)
    assert len(sibling.until_begun("old", 4)) == 1
    assert not sibling.outputs["old long"]


def test_classes_stay_above_resumed_streams() -> None:
    sibling = Sibling()
    sibling.submit("new", [1, 2, 3], priority=Priority.HIGH)
    sibling.now += 0.5
    for i in range(36):
        sibling.resume(f"old{i}", [500 + i, *range(100, 110)], num_made=4)
    assert prompts_in(sibling.step() or StepPlan([]), "new") == ["new"]


def test_nobody_gives_a_place_to_one_who_would_keep_it_from_a_new_one() -> None:
    bench = Bench(max_num_seqs=2)
    for i in range(2):
        bench.submit(f"own{i}", [900 + i], max_tokens=8)
    bench.step()
    bench.submit("old", [1, 2, 3], 8, output_ids=expected([1, 2, 3], 2), is_resumed=True)
    bench.run()
    assert bench.scheduler.counters.preemptions == 0
    assert bench.outputs["old"] == expected([1, 2, 3], 8)[2:]


@pytest.mark.parametrize("tenants", [("a", "a"), ("a", "b")], ids=["one tenant", "two tenants"])
def test_after_thirty_seconds_they_are_like_others(tenants: tuple[str, str]) -> None:
    """A request that came before them goes first again: all that they cost others is bounded by that time. Among
    several tenants it does after twenty already, as the oldest of all."""
    sibling = Sibling(num_own=0)
    sibling.now += 20.0
    sibling.submit("new", [1, *range(100, 300)], tenant=tenants[0])
    for i in range(40):
        sibling.resume(f"old{i}", [500 + i, *range(100, 500)], num_made=4, tenant=tenants[1])
    assert not prompts_in(sibling.step() or StepPlan([]), "new")
    sibling.now += 19.0
    assert not prompts_in(sibling.step() or StepPlan([]), "new")
    sibling.now += 11.0
    assert prompts_in(sibling.step() or StepPlan([]), "new")


def test_what_they_are_given_is_charged_to_their_tenant() -> None:
    sibling = Sibling(num_own=0)
    sibling.submit("b0", [1, 2, 3], 100, tenant="b")
    sibling.resume("a0", [500, *range(100, 400)], num_made=4, tenant="a")
    sibling.until_begun("a0", 1)
    sibling.submit("a1", [5, *range(300, 360)], tenant="a")
    sibling.submit("b1", [6, *range(400, 460)], tenant="b")
    plan = sibling.step()
    assert plan is not None
    assert prompts_in(plan, "") == ["b1"], "the other tenant was given less, and goes next"


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=20),
    st.lists(st.integers(1, 60), max_size=20),
    st.integers(0, 20),
)
@settings(max_examples=examples(30), deadline=None)
def test_whatever_they_are_all_are_resumed_in_as_many_steps_as_their_tokens_fill(
    old: list[tuple[int, int]], new: list[int], num_own: int
) -> None:
    sibling = Sibling(num_own)
    for i, length in enumerate(new):
        sibling.submit(f"new{i}", [i + 1] * length, tenant="b" if i % 2 else "")
    for i, (length, num_made) in enumerate(old):
        sibling.resume(f"old{i}", [500 + i] * length, num_made)
    num_tokens = sum(length + num_made for length, num_made in old)
    room = CHUNK - num_own - len(old)  # each that has begun has one token in every step
    plans = sibling.until_begun("old", len(old))
    assert len(plans) <= -(-num_tokens // room)
