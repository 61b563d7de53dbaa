"""Drafts by a small model that knows the same tokens. It is a runner like any other, and is driven here step by step.

Its cache has the blocks of the large model's: who owns a block there owns it here, so nothing is handed out twice, and
what is lost there is lost here. It computes what it has not seen of a sequence, whoever chose it, and guesses on from
there, always the likeliest token: a guess is compared with what the large model chooses, and the likeliest is chosen
most often, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from penstock.core.sampling import SamplingParams
from penstock.kv.pool import BlockPool
from penstock.sched.plan import Runner, SampleSpec, Slice, StepPlan
from penstock.sched.sequence import Sequence as LiveSequence

_LIKELIEST = SampleSpec(SamplingParams(temperature=0.0), history=(), prompt_len=0, position=0)
_FEW = 4  # tokens that it has not seen, per sequence: more are a prompt


@dataclass
class _Seen:
    """What its cache holds of a sequence."""

    epoch: int
    num_known: int = 0  # tokens of the sequence …
    guesses: list[int] = field(default_factory=list)  # … and guesses after them

    def agrees_with(self, sequence: LiveSequence) -> int:
        """How many of the sequence's tokens are there."""
        if self.epoch != sequence.epoch:
            return 0
        count = self.num_known
        for guess, token_id in zip(self.guesses, sequence.token_ids[count:], strict=False):
            if guess != token_id:
                break
            count += 1
        return min(count, len(sequence.token_ids) - 1)  # the last is computed again: the next follows from it


class DraftModel:
    def __init__(
        self, runner: Runner, pool: BlockPool, *, context_length: int, chunk_tokens: int, reserve: int
    ) -> None:
        """`pool` is that of the large model; so many of its blocks are left for those who decode without drafts."""
        self._runner = runner
        self._pool = pool
        self._context_length = context_length
        self._chunk_tokens = chunk_tokens
        self._reserve = reserve
        self._seen: WeakKeyDictionary[LiveSequence, _Seen] = WeakKeyDictionary()
        self.is_settled = True

    def look(self, sequence: LiveSequence) -> int | None:
        return 0 if sequence.table is not None and len(sequence.token_ids) < self._context_length else None

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        counts = {sequence: room for sequence, count in wanted if (room := self._with_room(sequence, count))}
        first = self._begin(list(counts))
        guesses = {sequence: [token_id] for sequence, token_id in zip(counts, first, strict=True)}
        for number in range(1, max(counts.values(), default=0)):
            going = [sequence for sequence, count in counts.items() if count > number]
            plan = [self._one(sequence, guesses[sequence]) for sequence in going]
            for sequence, token_id in zip(going, self._run(plan), strict=True):
                guesses[sequence].append(token_id)
        for sequence, made in guesses.items():  # the last was not computed
            self._seen[sequence] = _Seen(sequence.epoch, len(sequence.token_ids), made[:-1])
        return [guesses.get(sequence, []) for sequence, _ in wanted]

    def _with_room(self, sequence: LiveSequence, count: int) -> int:
        """As many as its context, and the blocks that nobody needs, have room for."""
        known, table = len(sequence.token_ids), sequence.table
        count = min(count, self._context_length - known)
        if table is None or self._pool.num_free < self._reserve or not table.grow(known + count):
            return 0
        return count

    def _begin(self, sequences: Sequence[LiveSequence]) -> list[int]:
        """All that it has not seen, in steps that are not too large, and the first guess after it."""
        starts = [self._start(sequence) for sequence in sequences]
        unseen = [len(s.token_ids) - start for s, start in zip(sequences, starts, strict=True)]
        self.is_settled = all(count <= _FEW for count in unseen)
        if sum(unseen) <= self._chunk_tokens:
            plan = [_slice(s, at, s.token_ids[at:], True) for s, at in zip(sequences, starts, strict=True)]
            return self._run(plan) if plan else []
        return [self._begin_one(sequence, start) for sequence, start in zip(sequences, starts, strict=True)]

    def _begin_one(self, sequence: LiveSequence, start: int) -> int:
        known = sequence.token_ids
        while len(known) - start > self._chunk_tokens:
            end = start + self._chunk_tokens
            self._run([_slice(sequence, start, known[start:end], False)])
            start = end
        return self._run([_slice(sequence, start, known[start:], True)])[0]

    def _start(self, sequence: LiveSequence) -> int:
        seen = self._seen.get(sequence)
        return seen.agrees_with(sequence) if seen is not None else 0

    def _one(self, sequence: LiveSequence, guesses: list[int]) -> Slice:
        return _slice(sequence, len(sequence.token_ids) + len(guesses) - 1, guesses[-1:], True)

    def _run(self, slices: list[Slice]) -> list[int]:
        sampled = self._runner.submit(StepPlan(slices)).result().sampled
        return [one.token_ids[0] for one in sampled if one is not None]


def _slice(sequence: LiveSequence, start: int, token_ids: list[int], is_last: bool) -> Slice:
    assert sequence.table is not None
    sample = _LIKELIEST if is_last else None
    return Slice(
        sequence.request.id, start, len(token_ids), token_ids, sequence.table.block_ids, sample, sequence.epoch
    )
