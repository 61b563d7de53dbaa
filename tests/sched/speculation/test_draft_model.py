"""A small model that drafts for a large one, both fakes that notice a wrong, stale or foreign block."""

from __future__ import annotations

import pytest

from penstock.core.request import Request
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner, fake_token
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation.draft_model import DraftModel
from penstock.sched.speculation.speculation import Speculation

BLOCK = 4


class Counting(FakeRunner):
    """Remembers how many tokens it computed."""

    num_tokens = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        self.num_tokens += plan.num_tokens
        return super().submit(plan)


class Bench:
    def __init__(
        self, *, num_blocks: int = 128, context_length: int = 1000, same: bool = True, overlaps: bool = False
    ) -> None:
        self.cache = KVCache(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, StepBudget(64, target_s=None, floor=BLOCK), max_num_seqs=8)
        self.large = FakeRunner(num_blocks, BLOCK)
        self.small = Counting(num_blocks, BLOCK, vocab_size=1000 if same else 7, overlaps=overlaps)
        self.draft = DraftModel(self.small, self.cache.pool, context_length=context_length, chunk_tokens=16, reserve=8)
        self.speculation = Speculation(self.draft, 4)
        self.outputs: dict[str, list[int]] = {}
        self.num_steps = 0

    def submit(self, name: str, prompt: list[int], max_tokens: int = 24, **options: object) -> None:
        self.scheduler.submit(Request(name, prompt, max_tokens, **options), 0.0)  # type: ignore[arg-type]
        self.outputs[name] = []

    def step(self) -> None:
        plan = self.scheduler.plan(float(self.num_steps), self.speculation.drafts(self.scheduler.decoding))
        if plan is None:
            return
        self.num_steps += 1
        result = self.large.submit(plan).result()
        # Drafts cost a tenth of a step.
        self.speculation.observe(plan, result, 0.01 + 0.001 * sum(len(s.ahead) for s in plan.slices))
        for event in self.scheduler.commit(plan, result, float(self.num_steps)):
            self.outputs[event.request_id] += event.token_ids

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
            assert self.num_steps < 500
        assert self.cache.pool.num_free == self.cache.pool.num_blocks


def expected(prompt: list[int], count: int, seed: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, 1000, seed=seed))
    return tokens[len(prompt) :]


PROMPTS = {"a": [1, 2, 3], "b": [1, 2, 3, 4, 5, 6, 7, 8, 9], "c": list(range(40, 75))}


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_answers_are_those_of_the_large_model(same: bool, overlaps: bool) -> None:
    """Prompts that fit a step of the small model, and one that does not."""
    bench = Bench(same=same, overlaps=overlaps)
    for name, prompt in PROMPTS.items():
        bench.submit(name, prompt)
        bench.step()
    bench.run()
    assert bench.outputs == {name: expected(prompt, 24) for name, prompt in PROMPTS.items()}
    accepted = bench.scheduler.counters.accepted_tokens
    assert accepted > 30 if same else accepted < 5


@pytest.mark.parametrize("overlaps", [True, False])
def test_it_computes_each_token_once_however_much_held(overlaps: bool) -> None:
    """All that it guesses holds, so beside the prompt it computes what it guesses, and the large model's own tokens."""
    bench = Bench(overlaps=overlaps)
    bench.submit("a", list(range(20)), max_tokens=60)
    bench.run()
    assert bench.scheduler.counters.accepted_tokens == bench.scheduler.counters.drafted_tokens > 30
    assert bench.small.num_tokens <= 20 + 60


def test_guesses_are_the_likeliest_even_where_the_answer_is_drawn() -> None:
    bench = Bench()
    bench.submit("a", [1, 2, 3], sampling=SamplingParams(seed=9))
    bench.run()
    assert bench.outputs["a"] == expected([1, 2, 3], 24, seed=9)
    assert bench.scheduler.counters.accepted_tokens < 5


def test_preempted_sequences_are_drafted_for_again() -> None:
    bench = Bench(num_blocks=20)
    prompts = {name: [ord(name)] * 9 for name in "abcd"}
    for name, prompt in prompts.items():
        bench.submit(name, prompt)
    bench.run()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.accepted_tokens > 0
    assert bench.outputs == {name: expected(prompt, 24) for name, prompt in prompts.items()}


def test_beyond_the_small_models_context_nothing_is_drafted() -> None:
    bench = Bench(context_length=20)
    bench.submit("a", [1, 2, 3], max_tokens=40)
    bench.run()
    assert bench.outputs["a"] == expected([1, 2, 3], 40)
    assert 0 < bench.scheduler.counters.drafted_tokens <= 20


def test_without_blocks_to_spare_nothing_is_drafted() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", [1, 2, 3], max_tokens=29)
    bench.run()
    assert bench.scheduler.counters.drafted_tokens == 0
    assert bench.outputs["a"] == expected([1, 2, 3], 29)
