"""Guided sequences in the scheduler, with guides that follow a script."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import KVCache
from penstock.kv.states import StateSlots
from penstock.sched.budget import StepBudget
from penstock.sched.guiding import Follow
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler

BLOCK = 4
EOS = 2
VOCAB = 1000


@dataclass
class Script:
    """Each turn: the tokens that may come, and those that then must. After the last comes the end."""

    turns: list[tuple[tuple[int, ...], list[int]]]
    is_ready: bool = True
    error_at: int | None = None
    taken: list[int] = field(default_factory=list)

    @property
    def is_quick(self) -> bool:
        return self.is_ready

    def bits(self) -> bytes:
        allowed = self.turns[len(self.taken)][0] if len(self.taken) < len(self.turns) else (EOS,)
        return sum(1 << token_id for token_id in allowed).to_bytes(VOCAB // 8, "little")

    def take(self, token_id: int) -> Follow:
        turn = len(self.taken)
        self.taken.append(token_id)
        if self.error_at == turn:
            return Follow([], FinishReason.ERROR, "too complex")
        if turn >= len(self.turns):
            assert token_id == EOS
            return Follow([])
        allowed, forced = self.turns[turn]
        assert token_id in allowed
        return Follow(forced) if turn + 1 < len(self.turns) else Follow([*forced, EOS], FinishReason.STOP)


class Bench:
    def __init__(
        self,
        *,
        overlaps: bool = False,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        chunk: int = 32,
        recurrent: bool = False,
    ) -> None:
        self.overlaps = overlaps
        states = StateSlots(max_num_seqs, 2, min_tokens=BLOCK) if recurrent else None
        cache = KVCache(num_blocks, BLOCK, states=states)
        budget = StepBudget(chunk, target_s=None, floor=BLOCK)
        self.scheduler = Scheduler(cache, budget, max_num_seqs=max_num_seqs)
        self.runner = FakeRunner(num_blocks, BLOCK, vocab_size=VOCAB, overlaps=overlaps)
        self.events: dict[str, list[TokenEvent]] = {}
        self.plans: list[StepPlan] = []

    def submit(
        self,
        name: str,
        guide: Script | None,
        *,
        max_tokens: int = 40,
        prompt: list[int] | None = None,
        **options: object,
    ) -> None:
        request = Request(name, prompt or [5, 6, 7], max_tokens, stop_token_ids=[EOS], **options)  # type: ignore[arg-type]
        self.scheduler.submit(request, 0.0, guide)
        self.events[name] = []

    def run(self, most_steps: int = 300) -> None:
        previous = None
        for step in range(most_steps):
            plan = self.scheduler.plan(float(step))
            current = None
            if plan is not None:
                self.plans.append(plan)
                current = plan, self.runner.submit(plan)
            if not self.overlaps and current is not None:
                previous, current = current, None
            if previous is not None:
                for event in self.scheduler.commit(previous[0], previous[1].result(), float(step)):
                    self.events[event.request_id].append(event)
            if current is not None:
                current[1].choose()
            previous = current
            if not self.scheduler.has_work:
                return

    def tokens(self, name: str) -> list[int]:
        return [token_id for event in self.events[name] for token_id in event.token_ids]

    def finish(self, name: str) -> FinishReason | None:
        return self.events[name][-1].finish


TURNS: list[tuple[tuple[int, ...], list[int]]] = [((10, 11), []), ((20,), [21, 22, 23]), ((30, 31, 32), [33])]


@pytest.mark.parametrize("overlaps", [False, True])
def test_tokens_come_from_the_mask_and_forced_ones_after_them(overlaps: bool) -> None:
    bench = Bench(overlaps=overlaps)
    guide = Script(TURNS)
    bench.submit("a", guide)
    bench.submit("free", None, max_tokens=12)
    bench.run()
    first, *middle, last = bench.tokens("a")[:1], bench.tokens("a")[1:5], bench.tokens("a")[5:]
    assert first[0] in (10, 11)
    assert middle == [[20, 21, 22, 23]]
    assert last[0] in (30, 31, 32)
    assert last[1:] == [33, EOS]
    assert bench.finish("a") is FinishReason.STOP
    assert len(bench.tokens("free")) == 12


def test_forced_tokens_are_computed_in_one_step() -> None:
    bench = Bench()
    bench.submit("a", Script(TURNS))
    bench.run()
    assert [s.num_tokens for plan in bench.plans for s in plan.slices] == [3, 1, 4]


def test_a_guide_that_is_not_ready_holds_back_its_own_sequence_only() -> None:
    bench = Bench()
    guide = Script(TURNS, is_ready=False)
    bench.submit("a", guide)
    bench.submit("free", None, max_tokens=5)
    bench.run(most_steps=20)
    assert bench.tokens("a") == []
    assert bench.finish("free") is FinishReason.LENGTH
    guide.is_ready = True
    bench.run()
    assert bench.finish("a") is FinishReason.STOP


def test_a_guide_that_becomes_slow_lets_others_run() -> None:
    bench = Bench()
    guide = Script([((10,), [11, 12])] * 4)
    bench.submit("a", guide)
    bench.run(most_steps=1)
    guide.is_ready = False
    before = len(bench.tokens("a"))
    bench.submit("free", None, max_tokens=5)
    bench.run(most_steps=10)
    assert len(bench.tokens("a")) == before
    assert bench.finish("free") is FinishReason.LENGTH


def test_the_output_limit_cuts_forced_tokens() -> None:
    bench = Bench()
    bench.submit("a", Script(TURNS), max_tokens=3)
    bench.run()
    assert bench.tokens("a")[1:] == [20, 21]
    assert bench.finish("a") is FinishReason.LENGTH


def test_a_stop_token_among_the_forced_ends_the_answer() -> None:
    bench = Bench()
    bench.submit("a", Script([((10,), [11, EOS, 12]), ((13,), [])]))
    bench.run()
    assert bench.tokens("a") == [10, 11, EOS]
    assert bench.finish("a") is FinishReason.STOP


def test_the_end_of_a_guide_is_the_end_whatever_min_tokens_says() -> None:
    bench = Bench()
    bench.submit("a", Script([((10,), [])]), min_tokens=9)
    bench.run()
    assert bench.tokens("a") == [10, EOS]
    assert bench.finish("a") is FinishReason.STOP


def test_a_guide_that_fails_ends_its_sequence_with_an_error() -> None:
    bench = Bench()
    bench.submit("a", Script(TURNS, error_at=1))
    bench.submit("free", None, max_tokens=6)
    bench.run()
    assert bench.finish("a") is FinishReason.ERROR
    assert bench.events["a"][-1].error == "too complex"
    assert bench.finish("free") is FinishReason.LENGTH


def test_an_error_is_not_hidden_by_a_stop_token() -> None:
    bench = Bench()
    bench.submit("a", Script([((EOS,), [])], error_at=0))
    bench.run()
    assert bench.finish("a") is FinishReason.ERROR


def test_on_a_device_that_overlaps_a_guided_sequence_is_in_every_step() -> None:
    """Its masks are asked for when the token before is known; what was chosen in place of a forced one is void."""
    bench = Bench(overlaps=True)
    bench.submit("a", Script([((10, 11, 12), [])] * 20 + [((20,), [21])] + [((30, 31), [])] * 10))
    bench.run()
    assert len(bench.tokens("a")) == 33  # 31 turns, one forced token and the end
    assert bench.tokens("a")[20:22] == [20, 21]
    assert len(bench.plans) <= 31 + 2


def test_a_slow_guide_waits_for_its_token_on_a_device_that_overlaps() -> None:
    class Slow(Script):
        @property
        def is_quick(self) -> bool:
            return False

    bench = Bench(overlaps=True)
    bench.submit("a", Slow(TURNS))
    bench.submit("free", None, max_tokens=12)
    bench.run()
    assert bench.tokens("a")[1:5] == [20, 21, 22, 23]
    assert all(not s.awaits_token for plan in bench.plans for s in plan.slices if s.request_id == "a")


@pytest.mark.parametrize("overlaps", [False, True])
def test_preempted_guided_sequences_go_on_where_they_were(overlaps: bool) -> None:
    """With room for few blocks they push each other out; what they say is what they say alone."""
    alone = {}
    for name in "abc":
        bench = Bench()
        bench.submit(name, Script([((10, 11, 12), [13, 14])] * 6), prompt=[ord(name)] * 5)
        bench.run()
        alone[name] = bench.tokens(name)
    crowded = Bench(overlaps=overlaps, num_blocks=12)
    for name in "abc":
        crowded.submit(name, Script([((10, 11, 12), [13, 14])] * 6), prompt=[ord(name)] * 5)
    crowded.run()
    assert crowded.scheduler.counters.preemptions > 0
    assert {name: crowded.tokens(name) for name in "abc"} == alone


def test_an_aborted_guided_sequence_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.submit("a", Script(TURNS))
    bench.run(most_steps=1)
    assert bench.scheduler.abort("a")
    assert not bench.scheduler.has_work
    assert bench.scheduler.cache.held_tokens == 0


def test_sequences_without_a_guide_carry_no_mask() -> None:
    bench = Bench()
    bench.submit("free", None, max_tokens=3, sampling=SamplingParams(temperature=0.0))
    bench.run()
    assert all(s.sample is None or s.sample.mask is None for plan in bench.plans for s in plan.slices)
