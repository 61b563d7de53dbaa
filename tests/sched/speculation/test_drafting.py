"""Drafts in the scheduler: whatever is guessed, and however much of it holds, what comes is what would have come."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant

from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner, fake_token
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.guiding import Follow, Mask
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence
from penstock.sched.speculation.drafting import Drafts
from tests.examples import examples
from tests.sched.test_properties import VOCAB, SchedulerMachine

BLOCK, EOS = 4, 2

Guess = Callable[[Sequence], list[int]]


def truth(sequence: Sequence, count: int, vocab_size: int = 1000) -> list[int]:
    """What the fake model will say."""
    tokens = list(sequence.token_ids)
    params = sequence.request.sampling
    for _ in range(count):
        tokens.append(fake_token(tokens, vocab_size, seed=0 if params.is_greedy else params.seed))
    return tokens[len(sequence.token_ids) :]


class Bench:
    def __init__(self, *, num_blocks: int = 64, chunk: int = 32) -> None:
        self.cache = KVCache(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, StepBudget(chunk, target_s=None, floor=BLOCK), max_num_seqs=8)
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []

    def submit(self, name: str, prompt: list[int], max_tokens: int = 20, **options: object) -> None:
        self.scheduler.submit(Request(name, prompt, max_tokens, **options), 0.0)  # type: ignore[arg-type]

    def step(self, guess: Guess) -> StepPlan | None:
        drafts: Drafts = {s.request.id: guess(s) for s in self.scheduler.decoding}
        plan = self.scheduler.plan(float(len(self.plans)), drafts)
        if plan is not None:
            self.plans.append(plan)
            result = self.runner.submit(plan).result()
            self.events += self.scheduler.commit(plan, result, float(len(self.plans)))
        return plan

    def run(self, guess: Guess) -> None:
        for _ in range(300):
            if not self.scheduler.has_work:
                break
            self.step(guess)
        assert not self.scheduler.has_work
        assert self.cache.pool.num_free == self.cache.pool.num_blocks

    def tokens(self, name: str) -> list[int]:
        return [token_id for event in self.events if event.request_id == name for token_id in event.token_ids]


def nothing(sequence: Sequence) -> list[int]:
    return []


def right(sequence: Sequence) -> list[int]:
    return truth(sequence, 3)


def wrong(sequence: Sequence) -> list[int]:
    return [(token_id + 1) % 1000 for token_id in truth(sequence, 3)]


def half_right(sequence: Sequence) -> list[int]:
    return [*truth(sequence, 2), 0, 0]


@pytest.mark.parametrize("guess", [right, wrong, half_right])
@pytest.mark.parametrize(
    "options", [{}, {"sampling": SamplingParams(seed=5)}, {"sampling": SamplingParams(num_logprobs=2)}]
)
def test_tokens_are_the_same_whatever_is_guessed(guess: Guess, options: dict[str, object]) -> None:
    plain, guessed = Bench(), Bench()
    for bench in (plain, guessed):
        bench.submit("a", [7, 8, 9], **options)
    plain.run(nothing)
    guessed.run(guess)
    assert guessed.tokens("a") == plain.tokens("a")
    if "sampling" in options and options["sampling"] != SamplingParams(seed=5):
        scores = [[score for event in bench.events for score in event.logprobs or ()] for bench in (plain, guessed)]
        assert scores[0] == scores[1]
        assert len(scores[0]) == 20


def test_drafts_that_hold_save_steps() -> None:
    bench = Bench()
    bench.submit("a", [7, 8, 9], max_tokens=21)
    bench.run(right)
    assert len(bench.plans) == 1 + 20 // 4
    assert bench.scheduler.counters.drafted_tokens == bench.scheduler.counters.accepted_tokens == 15


def test_drafts_that_do_not_hold_cost_no_step() -> None:
    bench = Bench()
    bench.submit("a", [7, 8, 9], max_tokens=20)
    bench.run(wrong)
    assert len(bench.plans) == 20
    assert bench.scheduler.counters.accepted_tokens == 0


def test_nothing_is_drafted_beyond_the_output_limit() -> None:
    bench = Bench()
    bench.submit("a", [7, 8, 9], max_tokens=3)
    bench.run(right)
    assert [len(s.ahead) for plan in bench.plans for s in plan.slices] == [0, 1]
    assert bench.events[-1].finish is FinishReason.LENGTH


def test_a_stop_token_among_drafts_that_hold_is_the_last() -> None:
    expected = Bench()
    expected.submit("a", [7, 8, 9])
    expected.run(nothing)
    stop = expected.tokens("a")[2]
    bench = Bench()
    bench.submit("a", [7, 8, 9], stop_token_ids=[stop])
    bench.run(right)
    assert bench.tokens("a") == expected.tokens("a")[:3]
    assert bench.events[-1].finish is FinishReason.STOP


def test_stop_tokens_are_banned_place_by_place_until_there_are_enough() -> None:
    bench = Bench()
    bench.submit("a", [7, 8, 9], stop_token_ids=[EOS], min_tokens=3)
    bench.step(nothing)
    plan = bench.step(lambda sequence: truth(sequence, 4))
    assert plan is not None
    (planned,) = plan.slices
    assert planned.sample is not None
    banned = [list(spec.banned_ids) for spec in (planned.sample, *planned.ahead)]
    assert banned == [[EOS], [EOS], [], [], []]


def test_every_place_has_its_own_history_and_random_number() -> None:
    bench = Bench()
    bench.submit("a", [7, 8, 9], sampling=SamplingParams(seed=3, repetition_penalty=1.1))
    bench.step(nothing)
    plan = bench.scheduler.plan(1.0, {s.request.id: right(s) for s in bench.scheduler.decoding})
    assert plan is not None
    (planned,) = plan.slices
    drafts = list(planned.drafts)
    assert len(drafts) == 3
    known = [7, 8, 9, *bench.events[0].token_ids]
    for count, spec in enumerate(planned.ahead, 1):
        assert list(spec.history) == [*known, *drafts[:count]]
        assert spec.position == len(known) + count


def test_nobody_gives_up_a_block_for_drafts() -> None:
    bench = Bench(num_blocks=4)
    bench.submit("a", [1, 2, 3], max_tokens=5)
    bench.submit("b", [4, 5, 6], max_tokens=5)
    bench.run(lambda sequence: truth(sequence, 12))
    assert bench.scheduler.counters.preemptions == 0
    assert len(bench.tokens("a")) == len(bench.tokens("b")) == 5


def test_drafts_wait_while_prompts_are_computed() -> None:
    bench = Bench(chunk=8)
    bench.submit("a", [1, 2, 3])
    bench.step(right)
    bench.submit("b", list(range(30)))
    while bench.scheduler.queued_tokens:
        plan = bench.step(right)
        assert plan is not None
        assert not any(s.ahead for s in plan.slices)


class Chooser:
    """A guide that permits numbers below 10 only, and makes 7 follow every 3."""

    is_quick = is_ready = True

    def bits(self) -> bytes:
        return (1023).to_bytes(125, "little")

    def ahead(self, drafts: list[int]) -> list[Mask]:
        return [_Only(7) if draft == 3 else self for draft in drafts]

    def take(self, token_id: int) -> Follow:
        assert token_id < 10
        return Follow([7] if token_id == 3 else [])


class _Only:
    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def bits(self) -> bytes:
        return (1 << self._token_id).to_bytes(125, "little")


@pytest.mark.parametrize("seed", range(6))
def test_what_a_guide_forces_takes_the_place_of_drafts(seed: int) -> None:
    source = random.Random(seed)
    outputs = []
    for guess in (nothing, lambda sequence: source.choices([3, 7, 1, 9], k=4)):
        bench = Bench()
        request = Request("a", [seed, 5], 30)
        bench.scheduler.submit(request, 0.0, Chooser())  # type: ignore[arg-type]
        bench.run(guess)
        outputs.append(bench.tokens("a"))
    assert outputs[0] == outputs[1]
    assert all(after == 7 for token, after in zip(outputs[0], outputs[0][1:], strict=False) if token == 3)


class DraftingMachine(SchedulerMachine):
    """All that the scheduler is held to, with drafts that are right, wrong, and right for a while."""

    @initialize(seed=st.integers(0, 1000), skill=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    def begin_drafting(self, seed: int, skill: float) -> None:
        self.random, self.skill = random.Random(seed), skill

    def plan(self) -> StepPlan | None:
        if not hasattr(self, "random"):
            return self.scheduler.plan(self.now)
        return self.scheduler.plan(self.now, {s.request.id: self.guess(s) for s in self.scheduler.decoding})

    def guess(self, sequence: Sequence) -> list[int]:
        known = truth(sequence, self.random.randrange(7), VOCAB)
        return [t if self.random.random() < self.skill else self.random.randrange(VOCAB) for t in known]

    @invariant()
    def what_can_be_found_is_what_was_computed(self) -> None:
        if not hasattr(self, "cache"):
            return
        for block_id, block in enumerate(self.cache.pool._blocks):
            if block.hash is not None:
                assert self.runner._slots[block_id] == list(block.token_ids)


TestDrafting = DraftingMachine.TestCase
TestDrafting.settings = settings(max_examples=examples(25), stateful_step_count=20)
