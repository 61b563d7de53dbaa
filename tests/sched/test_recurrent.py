"""Sequences with a recurrent state: whatever happens on the way, each token goes into its sequence's state once and in
its turn, and no slot is lost. The fake runner finds out what does not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant

from penstock.core.request import FinishReason, Request
from penstock.engine.engine import Engine, Step
from penstock.engine.fake import FakeRunner
from penstock.engine.messages import StepReport, Submit
from penstock.kv.cache import KVCache, TokenHashes
from penstock.kv.states import StateSlots
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepHandle, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from tests.examples import examples
from tests.sched.test_guiding import EOS, TURNS, Bench, Script
from tests.sched.test_properties import BLOCK, CHUNK, FLOOR, MAX_SEQS, VOCAB, Client, SchedulerMachine


class RecurrentMachine(SchedulerMachine):
    @initialize(num_blocks=st.integers(10, 24), overlaps=st.booleans(), num_snapshots=st.sampled_from([0, 1, 3, 20]))
    def start(self, num_blocks: int, overlaps: bool, num_snapshots: int) -> None:  # type: ignore[override]
        states = StateSlots(MAX_SEQS, num_snapshots, min_tokens=BLOCK)
        self.cache = KVCache(num_blocks, BLOCK, states=states)
        self.budget = StepBudget(CHUNK, target_s=0.05, floor=FLOOR)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs=MAX_SEQS, aging_s=1.0)
        self.runner = FakeRunner(num_blocks, BLOCK, vocab_size=VOCAB, overlaps=overlaps)
        self.in_flight: Step | None = None
        self.open: dict[str, Client] = {}
        self.block_namespace: dict[int, str] = {}
        self.disk = None
        self.count = 0
        self.now = 0.0

    @invariant()
    def each_running_sequence_has_one_slot(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        states, running = self.cache.states, self.scheduler._running
        assert states is not None
        slots = [sequence.table.state_slot for sequence in running if sequence.table is not None]
        assert len(set(slots)) == len(slots) == len(running) == states.num_slots - states.num_free
        assert all(slots), "slot 0 is nobody's"


TestRecurrentScheduler = RecurrentMachine.TestCase
TestRecurrentScheduler.settings = settings(max_examples=examples(30), stateful_step_count=20)


@pytest.mark.parametrize("overlaps", [False, True])
def test_forced_tokens_go_on_from_a_state_that_has_seen_no_retracted_one(overlaps: bool) -> None:
    """What was chosen beside a forced token is void, and was never computed."""
    bench = Bench(overlaps=overlaps, recurrent=True)
    bench.submit("a", Script(TURNS))
    bench.submit("b", Script(TURNS))
    bench.submit("free", None, max_tokens=12)
    bench.run()
    for name in "ab":
        assert bench.tokens(name)[1:5] == [20, 21, 22, 23]
        assert bench.tokens(name)[-1] == EOS
        assert bench.finish(name) is FinishReason.STOP
    states = bench.scheduler.cache.states
    assert states is not None
    assert states.num_free == states.num_slots


class Breaking(FakeRunner):
    """Its first step of more than one sequence comes to nothing, which is known late."""

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = super().submit(plan)
        return _Broken() if len(plan.slices) > 1 else handle


class _Broken:
    def choose(self) -> None:
        pass

    def result(self) -> StepResult:
        raise RuntimeError("the device has lost the step")


def test_nobody_goes_on_from_what_a_failed_step_may_have_spoiled() -> None:
    states = StateSlots(4, 8, min_tokens=BLOCK)
    cache, budget = KVCache(64, BLOCK, states=states), StepBudget(CHUNK, target_s=None, floor=FLOOR)
    runner = Breaking(64, BLOCK, vocab_size=VOCAB, overlaps=True)
    engine = Engine(Scheduler(cache, budget, max_num_seqs=4), runner)
    for name, prompt in (("a", [1] * 21), ("b", [2] * 5)):
        engine.receive([Submit(Request(name, prompt, 4))], 0.0)
    while engine.scheduler.has_work:
        engine.launch(0.0)
        if engine.may_launch:
            engine.launch(0.0)
        engine.choose()
        result = engine.result()
        if result is not None:
            engine.commit(result, 0.0)
    assert states.num_free == 4
    assert not states._snapshots
    assert not states.moves
    ended = [event for message in engine.outbox if isinstance(message, StepReport) for event in message.events]
    assert {event.request_id for event in ended if event.finish is FinishReason.ERROR} == {"a", "b"}


def test_a_sequence_waits_for_a_slot_as_for_blocks() -> None:
    cache = KVCache(16, 4, states=StateSlots(1))
    hashes, tokens = TokenHashes("", 4), [1, 2, 3]
    hashes.extend(tokens)
    first = cache.acquire(cache.match(hashes, tokens, 2), 3, hashes)
    assert first is not None
    assert cache.acquire(cache.match(hashes, tokens, 2), 3, hashes) is None
    assert cache.pool.num_free == 15, "nothing was taken"
    first.release()
    again = cache.acquire(cache.match(hashes, tokens, 2), 3, hashes)
    assert again is not None
    assert again.state_slot == 1


def test_a_slot_given_back_twice_is_a_defect() -> None:
    slots = StateSlots(2)
    slot = slots.allocate()
    assert slot is not None
    slots.release(slot)
    with pytest.raises(AssertionError, match="given back more often"):
        slots.release(slot)
