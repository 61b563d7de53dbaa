"""Drafts on a device that is given steps before the last one is read: the real loop over a device that exists in time
only. Where drafts pay it waits for them; where they do not, it goes ahead as if there were none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from penstock.bench.offline import OfflineMailbox
from penstock.core.request import Request
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner, fake_token
from penstock.engine.loop import EngineLoop
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepHandle, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.device_costs import DeviceCosts
from penstock.sched.speculation.speculation import Speculation

HOST_S = 0.0005  # of planning and committing a step
STEP_S, ROW_S = 0.004, 0.00001
GUESS_S = 0.0008  # of a small model, for one guess of everybody
VOCABULARY = 1000


@dataclass
class Time:
    """The host's; the device's is when it will be done with what it was given."""

    seconds: float = 0.0
    device_s: float = 0.0

    def now(self) -> float:
        return self.seconds

    def work(self, seconds: float) -> float:
        self.device_s = max(self.device_s, self.seconds) + seconds
        return self.device_s


@dataclass
class Step:
    handle: StepHandle
    done_s: float
    time: Time

    def choose(self) -> None:
        self.handle.choose()

    def result(self) -> StepResult:
        self.time.seconds = max(self.time.seconds, self.done_s)
        return self.handle.result()


class Device(FakeRunner):
    def __init__(self, time: Time) -> None:
        super().__init__(2048, 16, vocab_size=VOCABULARY, overlaps=True)
        self.time = time
        self.num_ahead = 0

    def submit(self, plan: StepPlan) -> StepHandle:
        self.time.seconds += HOST_S
        self.num_ahead += self.time.device_s > self.time.seconds
        return Step(super().submit(plan), self.time.work(STEP_S + ROW_S * plan.num_tokens), self.time)


class Guesser:
    """Right with some probability; as slow as a small model."""

    is_settled = is_steadfast = True

    def __init__(self, time: Time, chance: float) -> None:
        self._time, self._chance = time, chance
        self._dice = random.Random(0)

    def look(self, sequence: LiveSequence) -> int | None:
        return 0

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        self._time.seconds = self._time.work(GUESS_S * max(count for _, count in wanted))
        return [self._guess(sequence.token_ids, count) for sequence, count in wanted]

    def _guess(self, known: list[int], count: int) -> list[int]:
        tokens = list(known)
        for _ in range(count):
            right = fake_token(tokens, VOCABULARY)
            tokens.append(right if self._dice.random() < self._chance else (right + 1) % VOCABULARY)
        return tokens[len(known) :]


@dataclass
class Run:
    seconds: float
    answers: dict[str, list[int]]
    num_ahead: int
    drafted: int


def run(
    concurrency: int,
    chance: float | None,
    num_tokens: int = 400,
    speculation: Speculation | None = None,
    time: Time | None = None,
) -> Run:
    """Without a chance nobody guesses, unless told how."""
    time = time or Time()
    device = Device(time)
    if chance is not None:
        speculation = Speculation(Guesser(time, chance), 6, DeviceCosts(256))
    scheduler = Scheduler(KVCache(2048, 16), StepBudget(256, target_s=None, floor=16), max_num_seqs=64)
    box = OfflineMailbox([Request(f"r{i}", [i, 5, 6], num_tokens) for i in range(concurrency)])
    EngineLoop(Engine(scheduler, device, speculation=speculation), box, time).run()
    answers: dict[str, list[int]] = {}
    for event in box.events:
        answers.setdefault(event.request_id, []).extend(event.token_ids)
    return Run(time.seconds, answers, device.num_ahead, scheduler.counters.drafted_tokens)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_guesses_that_hold_make_it_faster_and_change_nothing(concurrency: int) -> None:
    plain, guessed = run(concurrency, None), run(concurrency, 0.9)
    assert guessed.answers == plain.answers
    assert guessed.seconds < 0.6 * plain.seconds


def test_guesses_that_never_hold_cost_next_to_nothing() -> None:
    plain, guessed = run(2, None, 900), run(2, 0.0, 900)
    assert guessed.answers == plain.answers
    assert 0 < guessed.drafted < 500
    assert guessed.seconds < 1.03 * plain.seconds
    assert guessed.num_ahead > 0.9 * plain.num_ahead


def test_where_nobody_guesses_every_step_but_the_first_goes_ahead() -> None:
    plain = run(3, None, 100)
    assert plain.num_ahead == 99


def test_a_proposer_that_breaks_while_a_step_is_in_flight_is_done_without() -> None:
    class Breaking(Guesser):
        num_looks = 0

        def look(self, sequence: LiveSequence) -> int | None:
            self.num_looks += 1
            if self.num_looks > 9:
                raise RuntimeError("it broke")
            return 0

    time = Time()
    broken = run(2, None, 100, Speculation(Breaking(time, 0.9), 6, DeviceCosts(256)), time)
    assert broken.answers == run(2, None, 100).answers
    assert broken.num_ahead > 80
