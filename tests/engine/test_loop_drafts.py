"""The engine's loop with drafts: the real loop over the fake runner, on a clock that drafts hardly move."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.offline import OfflineMailbox
from penstock.core.request import Request, TokenEvent
from penstock.engine.accounts import Accounts, Meter
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner, fake_token
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import FromEngine, StepReport
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.speculation import Speculation


class Ticking:
    """A hundredth of a second passes whenever somebody looks."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        self.seconds += 0.01
        return self.seconds


class Oracle:
    """Knows what the fake model will say, until it breaks."""

    is_settled = is_steadfast = True

    def __init__(self, breaks_after: int = 1000) -> None:
        self.left = breaks_after

    def look(self, sequence: LiveSequence) -> int | None:
        return 0

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the oracle broke")
        return [self._next(sequence.token_ids, count) for sequence, count in wanted]

    @staticmethod
    def _next(known: list[int], count: int) -> list[int]:
        tokens = list(known)
        for _ in range(count):
            tokens.append(fake_token(tokens, 1000))
        return tokens[len(known) :]


class Box(OfflineMailbox):
    """Keeps an account of what it is told, as a server does."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__(requests)
        self.accounts, self.meter = Accounts(), Meter()
        for request in requests:
            self.accounts.open(request, self.meter)

    def send(self, message: FromEngine) -> None:
        super().send(message)
        assert isinstance(message, StepReport)
        self.accounts.take(message)


def run(speculation: Speculation | None) -> Box:
    requests = [Request(name, [ord(name), 5, 6], 60) for name in "ab"]
    scheduler = Scheduler(KVCache(128, 4), StepBudget(64, target_s=None, floor=4), max_num_seqs=4)
    box = Box(requests)
    EngineLoop(Engine(scheduler, FakeRunner(128, 4), speculation=speculation), box, Ticking()).run()
    return box


def answers(events: list[TokenEvent]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"a": [], "b": []}
    for event in events:
        found[event.request_id] += event.token_ids
    return found


def test_answers_are_the_same_and_steps_are_fewer() -> None:
    plain, guessed = run(None), run(Speculation(Oracle(), 6))
    assert answers(plain.events) == answers(guessed.events)
    assert len(guessed.reports) < 0.5 * len(plain.reports)
    last = guessed.reports[-1].measured
    assert last.speculation.drafted_tokens == last.speculation.accepted_tokens > 60
    assert sum(report.step.num_drafts for report in guessed.reports) == last.speculation.drafted_tokens
    assert last.totals.generated_tokens == plain.reports[-1].measured.totals.generated_tokens == 120


def test_who_drafts_pays_and_nothing_is_left_over() -> None:
    """The time of all steps is charged, with drafts in them too."""
    box = run(Speculation(Oracle(), 6))
    assert abs(box.meter.cost.device_s - box.reports[-1].measured.totals.busy_s) < 1e-9


def test_a_proposer_that_breaks_is_done_without() -> None:
    box = run(Speculation(Oracle(breaks_after=3), 6))
    assert answers(box.events) == answers(run(None).events)
    assert 0 < box.reports[-1].measured.speculation.drafted_tokens < 60
