"""Adapters take turns on the device: what a step runs with is where the plan says, what runs is never displaced, and
nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.request import AdapterRef, Request
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.lora import AdapterSlots
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from tests.examples import examples

GREEDY = SamplingParams(temperature=0.0)


class Device:
    """A scheduler and the fake runner, and a look at every plan: is each adapter where its slices say?"""

    def __init__(self, num_slots: int, *, num_blocks: int = 64, max_num_seqs: int = 8) -> None:
        self.slots = AdapterSlots(num_slots, patience_s=5.0)
        self.scheduler = Scheduler(
            KVCache(num_blocks, 4),
            StepBudget(32, target_s=None, floor=4),
            max_num_seqs=max_num_seqs,
            adapters=self.slots,
        )
        self.runner = FakeRunner(num_blocks, 4)
        self.placed: dict[int, str] = {}
        self.adapters: dict[str, str] = {}  # of requests
        self.steps = 0
        self.first_step: dict[str, int] = {}
        self.waits: Counter[str] = Counter()

    def submit(self, name: str, adapter: str, *, length: int = 6, max_tokens: int = 3) -> None:
        ref = AdapterRef(adapter, adapter) if adapter else None
        self.adapters[name] = adapter
        request = Request(name, list(range(length)), max_tokens, sampling=GREEDY, adapter=ref)
        self.scheduler.submit(request, float(self.steps))

    def step(self) -> StepPlan | None:
        self.steps += 1
        plan = self.scheduler.plan(float(self.steps))
        if plan is None:
            assert not self.scheduler.has_work, "work is left, and nothing runs"
            return None
        for slot, adapter in plan.placements:
            self.placed[slot] = adapter
        for planned in plan.slices:
            self.first_step.setdefault(planned.request_id, self.steps)
            adapter = self.adapters[planned.request_id]
            assert (planned.slot is None) == (adapter == "")
            if planned.slot is not None:
                assert self.placed[planned.slot] == adapter, "a slice runs with another's adapter"
        self.scheduler.commit(plan, self.runner.submit(plan).result(), float(self.steps))
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.steps < 2000


@settings(max_examples=examples(60))
@given(
    num_slots=st.integers(1, 3),
    num_blocks=st.integers(8, 40),
    work=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "b", "c", "d"]), st.integers(1, 20), st.integers(1, 8)),
        min_size=1,
        max_size=14,
    ),
    pins=st.lists(st.sampled_from("abcd"), max_size=2),
    aborted=st.sets(st.integers(0, 13)),
)
def test_any_workload_runs_with_its_adapters_and_ends(
    num_slots: int, num_blocks: int, work: list[tuple[int, str, int, int]], pins: list[str], aborted: set[int]
) -> None:
    device = Device(num_slots, num_blocks=num_blocks)
    for pin in pins:
        device.slots.pin(pin)
    for place, (pause, adapter, length, max_tokens) in enumerate(work):
        device.submit(f"r{place}", adapter, length=min(length, 4 * num_blocks - max_tokens), max_tokens=max_tokens)
        for _ in range(pause):
            device.step()
        if place in aborted:
            device.scheduler.abort(f"r{place}")
    device.finish()
    for adapter in "abcd":
        assert device.slots.is_needed(adapter) == device.slots.is_pinned(adapter)
        device.slots.drop(adapter)
    assert device.slots.resident == []
    assert sorted(device.slots._free) == list(range(num_slots))


def test_one_that_was_used_longest_ago_gives_way() -> None:
    device = Device(2)
    for adapter in ("a", "b", "a", "c"):
        device.submit(f"{adapter}{device.steps}", adapter)
        device.finish()
    assert device.slots.resident == ["a", "c"]
    assert device.slots.swaps == 3


def test_one_that_runs_is_not_displaced_and_others_overtake_who_waits() -> None:
    device = Device(1)
    device.submit("long", "a", max_tokens=20)
    device.step()
    device.submit("other", "b")
    device.submit("plain", "")
    device.submit("same", "a")
    device.finish()
    assert device.first_step["plain"] < device.first_step["other"]
    assert device.first_step["same"] < device.first_step["other"]


def test_one_that_waited_long_enough_is_next() -> None:
    device = Device(1)
    device.submit("a0", "a", max_tokens=8)
    device.step()
    device.submit("b", "b")
    for place in range(1, 40):  # there is always another one for the adapter that is there
        device.submit(f"a{place}", "a", max_tokens=8)
        device.step()
    device.finish()
    waited = device.first_step["b"]
    assert waited < 25
    assert sum(step > waited for name, step in device.first_step.items() if name != "b") > 20


def test_pinned_adapter_stays_and_one_slot_is_left_for_the_others() -> None:
    device = Device(2)
    assert device.slots.pin("a")
    assert not device.slots.pin("b")
    assert device.slots.pin("a")
    for adapter in ("b", "c", "d"):
        device.submit(adapter, adapter)
        device.finish()
    assert set(device.slots.resident) == {"a", "d"}
    device.slots.unpin("a")
    for adapter in ("b", "c"):
        device.submit(f"{adapter} again", adapter)
        device.finish()
    assert set(device.slots.resident) == {"b", "c"}


def test_what_a_failed_step_was_to_place_is_placed_again() -> None:
    device = Device(2)
    device.submit("r", "a")
    plan = device.scheduler.plan(1.0)
    assert plan is not None
    assert plan.placements == [(0, "a")]
    device.scheduler.abort("r")  # the step failed: see Engine._give_up
    device.slots.undo(plan)
    device.submit("again", "a")
    plan = device.scheduler.plan(2.0)
    assert plan is not None
    assert [adapter for _, adapter in plan.placements] == ["a"]


def test_request_for_an_adapter_needs_an_engine_that_runs_them() -> None:
    with pytest.raises(AssertionError, match="runs no adapters"):
        Device(0).submit("r", "a")
