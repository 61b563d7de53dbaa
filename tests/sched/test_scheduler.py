import pytest

from penstock.core.request import FinishReason, Priority, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner, fake_token
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import SampleSpec, StepPlan
from penstock.sched.scheduler import Scheduler

BLOCK = 4


class Bench:
    """A scheduler with the strict fake runner behind it, one step at a time."""

    def __init__(self, num_blocks: int = 64, chunk: int = 32, max_num_seqs: int = 8, aging_s: float = 10.0) -> None:
        budget = StepBudget(chunk, target_s=None, floor=BLOCK)
        self.cache = KVCache(num_blocks, BLOCK)
        self.scheduler = Scheduler(self.cache, budget, max_num_seqs=max_num_seqs, aging_s=aging_s)
        self.runner = FakeRunner(num_blocks, BLOCK)
        self.now = 0.0
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.events: list[TokenEvent] = []

    def submit(self, name: str, prompt: list[int], max_tokens: int = 4, **options: object) -> None:
        self.scheduler.submit(Request(name, prompt, max_tokens, **options), self.now)  # type: ignore[arg-type]
        self.outputs[name] = []

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            result = self.runner.submit(plan).result()
            self.now += 0.01
            for event in self.scheduler.commit(plan, result, self.now):
                self.events.append(event)
                self.outputs[event.request_id] += event.token_ids
                if event.finish:
                    self.finished[event.request_id] = event.finish
        return plan

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler did not finish its work")


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, 1000))
    return tokens[len(prompt) :]


def names(plan: StepPlan | None) -> list[str]:
    return [s.request_id for s in plan.slices] if plan else []


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    bench = Bench(chunk=8)
    bench.submit("a", list(range(20)))
    assert [s.num_tokens for s in (bench.step() or StepPlan([])).slices] == [8]
    bench.run()
    assert bench.outputs["a"] == expected(list(range(20)), 4)
    assert bench.finished["a"] is FinishReason.LENGTH


def test_prefill_never_blocks_decode() -> None:
    bench = Bench(chunk=8)
    bench.submit("short", [1, 2], max_tokens=10)
    bench.step()
    bench.submit("long", list(range(30)))
    for _ in range(4):
        plan = bench.step()
        assert names(plan) == ["short", "long"]
        assert plan is not None
        assert plan.num_tokens <= 8


def test_answers_of_the_lowest_class_leave_the_steps_that_compute_prompts_of_higher_ones() -> None:
    bench = Bench(chunk=16)
    bench.submit("batch", [1, 2, 3], max_tokens=8, priority=Priority.LOW)
    bench.submit("chat", [4, 5, 6], max_tokens=8)
    bench.step()
    bench.submit("long", list(range(10, 40)), max_tokens=2)
    assert [names(bench.step()) for _ in range(3)] == [["chat", "long"], ["chat", "long"], ["chat", "long"]]
    assert names(bench.step()) == ["chat", "long", "batch"], "its prompt is computed"
    bench.run()
    assert bench.outputs["batch"] == expected([1, 2, 3], 8)


def test_they_do_not_leave_for_prompts_of_their_own_class_nor_once_they_are_old() -> None:
    bench = Bench(chunk=16, aging_s=10.0)
    bench.submit("batch", [1, 2, 3], max_tokens=20, priority=Priority.LOW)
    bench.step()
    bench.submit("another", list(range(10, 40)), max_tokens=1, priority=Priority.LOW)
    assert names(bench.step()) == ["another", "batch"]
    bench.now += 10.0
    bench.submit("urgent", list(range(50, 80)), max_tokens=1, priority=Priority.HIGH, tenant="another")
    assert "batch" in names(bench.step())


def test_a_finished_sequences_place_is_taken_in_the_next_step() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("a", [1], max_tokens=1)
    bench.submit("b", [2], max_tokens=1)
    assert names(bench.step()) == ["a"]
    assert names(bench.step()) == ["b"]


def test_a_stop_token_ends_the_sequence_but_not_before_min_tokens() -> None:
    first, second = expected([1, 2, 3], 2)
    bench = Bench()
    bench.submit("a", [1, 2, 3], max_tokens=9, stop_token_ids=[first, second])
    bench.submit("b", [1, 2, 3], max_tokens=9, stop_token_ids=[second])
    bench.run()
    assert (bench.outputs["a"], bench.finished["a"]) == ([first], FinishReason.STOP)
    assert bench.outputs["b"] == [first, second]


def test_siblings_wait_for_a_prefix_that_is_being_computed_and_share_it() -> None:
    bench = Bench(chunk=16)
    shared = list(range(32))
    for i in range(4):
        bench.submit(f"s{i}", [*shared, 100 + i])
    assert names(bench.step()) == ["s0"]
    assert names(bench.step()) == ["s0"]
    third = bench.step()
    assert names(third) == ["s0", "s1", "s2", "s3"]
    bench.run()
    assert bench.scheduler.counters.cached_tokens == 3 * 32
    for i in range(4):
        assert bench.outputs[f"s{i}"] == expected([*shared, 100 + i], 4)


def test_memory_pressure_preempts_the_last_comer_which_resumes_with_the_same_tokens() -> None:
    bench = Bench(num_blocks=8)
    bench.submit("a", list(range(8)), max_tokens=20)
    bench.submit("b", list(range(50, 58)), max_tokens=20)
    bench.run()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.outputs["a"] == expected(list(range(8)), 20)
    assert bench.outputs["b"] == expected(list(range(50, 58)), 20)
    assert bench.cache.pool.num_free == 8


def test_a_high_priority_newcomer_takes_the_place_of_a_low_one() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("low", [1, 2, 3], max_tokens=8, priority=Priority.LOW)
    bench.step()
    bench.submit("high", [4, 5, 6], max_tokens=2, priority=Priority.HIGH)
    assert names(bench.step()) == ["high"]
    bench.run()
    assert bench.outputs["low"] == expected([1, 2, 3], 8)


def test_age_lifts_a_waiting_sequence_above_younger_ones_of_a_higher_class() -> None:
    bench = Bench(max_num_seqs=1, aging_s=1.0)
    bench.submit("old", [1], max_tokens=1, priority=Priority.LOW)
    bench.now += 2.5
    bench.submit("new", [2], max_tokens=1, priority=Priority.HIGH)
    assert names(bench.step()) == ["old"]


def test_a_newcomer_is_held_back_for_the_latency_target_but_not_for_ever() -> None:
    bench = Bench(max_num_seqs=32)
    bench.scheduler.budget = StepBudget(32, target_s=0.001, floor=BLOCK)  # no step can be that fast
    for i in range(8):
        bench.submit(f"r{i}", [i], max_tokens=100)
    for _ in range(9):
        bench.step()
        bench.scheduler.budget.observe(8, 8, 0.01)
    assert bench.scheduler.budget.tokens == BLOCK
    bench.submit("late", [50], max_tokens=1)
    assert "late" not in names(bench.step())
    bench.now += 0.2
    assert "late" in names(bench.step())


def test_abort_frees_blocks_wherever_the_sequence_is() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("running", [1, 2, 3], max_tokens=9)
    bench.submit("waiting", [4, 5, 6], max_tokens=9)
    bench.step()
    assert bench.scheduler.abort("running")
    assert bench.scheduler.abort("waiting")
    assert not bench.scheduler.abort("running")
    assert not bench.scheduler.has_work
    assert bench.cache.pool.num_free == bench.cache.pool.num_blocks


def test_the_first_token_carries_its_timings_and_the_cached_tokens() -> None:
    bench = Bench()
    bench.submit("a", list(range(9)))
    bench.run()
    bench.submit("b", list(range(9)))
    bench.now += 0.5
    bench.run()
    first = next(e for e in bench.events if e.request_id == "b")
    assert first.cached_tokens == 8
    assert first.timings is not None
    assert first.timings.queue_s == 0.5
    assert sum(e.timings is not None for e in bench.events) == 2


# -- output that was made elsewhere


def specs(output_ids: list[int]) -> list[SampleSpec]:
    """How each token was asked for, with the history as it was then."""
    bench = Bench()
    params = SamplingParams(seed=7, presence_penalty=1.0, repetition_penalty=1.5)
    bench.submit("a", [1, 2, 3], 10, sampling=params, min_tokens=6, stop_token_ids=[500], output_ids=output_ids)
    found = []
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan(bench.now)
        assert plan is not None
        (spec,) = [planned.sample for planned in plan.slices]
        assert spec is not None
        found.append(SampleSpec(spec.params, list(spec.history), spec.prompt_len, spec.position, list(spec.banned_ids)))
        bench.scheduler.commit(plan, bench.runner.submit(plan).result(), bench.now)
    return found


@pytest.mark.parametrize("num_made_elsewhere", [1, 5, 6, 9])
def test_after_output_made_elsewhere_tokens_are_chosen_as_if_it_had_been_made_here(num_made_elsewhere: int) -> None:
    undisturbed = specs([])
    assert len(undisturbed) == 10
    output_ids = list(undisturbed[-1].history[3:])[:num_made_elsewhere]
    assert specs(output_ids) == undisturbed[num_made_elsewhere:]


def test_the_first_token_made_here_tells_how_much_of_the_prompt_alone_was_cached() -> None:
    bench = Bench()
    prompt = list(range(10))
    for name in ("a", "b"):
        bench.submit(name, prompt, 30, output_ids=expected(prompt, 12))
        bench.run()
    first = {name: next(event for event in bench.events if event.request_id == name) for name in ("a", "b")}
    assert first["a"].cached_tokens == 0
    assert first["b"].cached_tokens == 10
    assert first["b"].timings is not None
    assert bench.outputs["b"] == expected(prompt, 30)[12:]


def test_queued_tokens_are_those_that_no_step_has_taken_yet() -> None:
    bench = Bench(chunk=8)
    bench.submit("a", list(range(20)))
    bench.submit("b", list(range(50, 60)))
    assert bench.scheduler.queued_tokens == 30
    bench.step()
    assert bench.scheduler.queued_tokens == 22
    bench.step()
    assert bench.scheduler.queued_tokens == 14
    bench.scheduler.abort("a")
    assert bench.scheduler.queued_tokens == 10
    bench.run()
    assert bench.scheduler.queued_tokens == 0
