"""Speculation that guesses whether it pays or not, so that what a test does depends on no clock."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from penstock.sched.plan import StepPlan, StepResult
from penstock.sched.sequence import Sequence as LiveSequence
from penstock.sched.speculation.drafting import Drafts, room_of
from penstock.sched.speculation.speculation import Proposer, Speculation

Answers = Mapping[str, Sequence[int]]  # by request id


class Eager(Speculation):
    """Asks for `most` guesses for most of those who may have some, in most steps: the others go ahead of results."""

    def __init__(self, proposer: Proposer, most: int, seed: int = 0) -> None:
        super().__init__(proposer, most)
        self._dice = random.Random(seed)
        self.num_ahead = 0  # steps that went out before the one before was read

    def wants(self, decoding: Sequence[LiveSequence]) -> bool:
        return bool(decoding) and self._dice.random() < 0.5

    def drafts(self, decoding: Sequence[LiveSequence]) -> Drafts:
        going = [s for s in decoding if self._proposer.look(s) is not None and self._dice.random() < 0.8]
        wanted = [(s, min(self._most_tokens, room_of(s))) for s in going]
        return dict(zip([s.request.id for s in going], self._proposer.propose(wanted), strict=True))

    def observe(self, plan: StepPlan, result: StepResult, seconds: float, *, is_ahead: bool = False) -> None:
        self.num_ahead += is_ahead


class Recalling:
    """Knows the answers, and errs on purpose."""

    is_settled = is_steadfast = True

    def __init__(self, answers: Answers, chance: float, vocab_size: int) -> None:
        self._answers, self._chance, self._vocab_size = answers, chance, vocab_size
        self._dice = random.Random(1)

    def look(self, sequence: LiveSequence) -> int | None:
        return 0

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in wanted]

    def _guess(self, sequence: LiveSequence, count: int) -> list[int]:
        begin = sequence.num_generated
        known = self._answers[sequence.request.id][begin : begin + self._dice.randint(0, count)]
        return [t if self._dice.random() < self._chance else self._dice.randrange(self._vocab_size) for t in known]
