"""Drafts by a small model that knows the same tokens. It is a runner like any other, and is driven here step by step.

All guesses are launched before one is read, on a device that may be given a step before the last one is read.

Its cache has the blocks of the large model's: a sequence that owns a block there owns it here, so nothing is handed out
twice, and what is lost there is lost here. It computes what it has not seen of a sequence, whoever chose it, and
guesses on from there, always the likeliest token: a guess is compared with what the large model chooses, and the
likeliest is chosen most often, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from penstock.core.sampling import SamplingParams
from penstock.kv.pool import BlockPool
from penstock.sched.plan import Runner, SampleSpec, Slice, StepHandle, StepPlan
from penstock.sched.sequence import Sequence as LiveSequence

_LIKELIEST = SampleSpec(SamplingParams(temperature=0.0), history=(), prompt_len=0, position=0)
_FEW = 4  # tokens that it has not seen, per sequence: more are a prompt


@dataclass
class _Seen:
    """Tokens and guesses of a sequence that the draft model's cache holds."""

    epoch: int
    num_known: int = 0  # tokens of the sequence …
    guesses: list[int] = field(default_factory=list)  # … and guesses after them

    def agrees_with(self, sequence: LiveSequence) -> int:
        """Number of the sequence's tokens that are in the cache, the last one never among them."""
        if self.epoch != sequence.epoch:
            return 0
        count = self.num_known
        for guess, token_id in zip(self.guesses, sequence.token_ids[count:], strict=False):
            if guess != token_id:
                break
            count += 1
        return min(count, len(sequence.token_ids) - 1)  # the last is computed again: the next follows from it


class DraftModel:
    is_steadfast = True  # it has something to say about everything

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
        """It sees no images: what it would say of them is worth nothing."""
        if sequence.request.images or sequence.table is None or len(sequence.token_ids) >= self._context_length:
            return None
        return 0

    def propose(self, wanted: Sequence[tuple[LiveSequence, int]]) -> list[list[int]]:
        counts = {sequence: room for sequence, count in wanted if (room := self._with_room(sequence, count))}
        guesses: dict[LiveSequence, list[int]] = {sequence: [] for sequence in counts}
        unread = self._begin(guesses)
        for number in range(1, max(counts.values(), default=0)):
            while unread and not self._runner.overlaps:  # else the device knows the last guess, and nobody waits
                _read(unread.pop(), guesses)
            going = [sequence for sequence, count in counts.items() if count > number]
            unread.append(self._submit(going, [self._one(sequence, number, guesses[sequence]) for sequence in going]))
        for step in unread:
            _read(step, guesses)
        for sequence, made in guesses.items():  # the last was not computed
            self._seen[sequence] = _Seen(sequence.epoch, len(sequence.token_ids), made[:-1])
        return [guesses.get(sequence, []) for sequence, _ in wanted]

    def _with_room(self, sequence: LiveSequence, count: int) -> int:
        """Number of tokens, `count` at most, that its context and the blocks that nobody needs have room for."""
        known, table = len(sequence.token_ids), sequence.table
        count = min(count, self._context_length - known)
        if table is None or self._pool.num_free < self._reserve or not table.grow(known + count):
            return 0
        return count

    def _begin(self, guesses: dict[LiveSequence, list[int]]) -> list[_Step]:
        """All that it has not seen, in steps that are not too large, and the first guess after it: read, where there
        were several steps, or in the step that is returned."""
        starts = {sequence: self._start(sequence) for sequence in guesses}
        unseen = {sequence: len(sequence.token_ids) - start for sequence, start in starts.items()}
        self.is_settled = all(count <= _FEW for count in unseen.values())
        going = sorted(guesses, key=unseen.__getitem__)  # single tokens come first in a step
        while sum(unseen[sequence] for sequence in going) > self._chunk_tokens:
            longest = going.pop()
            guesses[longest] = self._begin_one(longest, starts[longest])
        slices = [self._slice(s, starts[s], s.token_ids[starts[s] :], True) for s in going]
        return [self._submit(going, slices)] if going else []

    def _begin_one(self, sequence: LiveSequence, start: int) -> list[int]:
        known, found = sequence.token_ids, list[int]()
        while not found:
            end = min(start + self._chunk_tokens, len(known))
            step = self._submit([sequence], [self._slice(sequence, start, known[start:end], end == len(known))])
            (sampled,), start = step.handle.result().sampled, end
            found = sampled.token_ids if sampled is not None else []
        return found

    def _start(self, sequence: LiveSequence) -> int:
        seen = self._seen.get(sequence)
        return seen.agrees_with(sequence) if seen is not None else 0

    def _one(self, sequence: LiveSequence, number: int, guesses: list[int]) -> Slice:
        """Slice of one more guess, from the guess before, or without a token if that is on the device still."""
        return self._slice(sequence, len(sequence.token_ids) + number - 1, guesses[number - 1 :], True)

    def _slice(self, sequence: LiveSequence, start: int, token_ids: list[int], is_last: bool) -> Slice:
        assert sequence.table is not None
        count = max(len(token_ids), 1)
        num_blocks = -(-(start + count) // self._pool.block_size)  # it may have more than this model's context needs
        sample = _LIKELIEST if is_last else None
        blocks = sequence.table.block_ids[:num_blocks]
        return Slice(sequence.request.id, start, count, token_ids, blocks, sample, sequence.epoch)

    def _submit(self, sequences: Sequence[LiveSequence], slices: list[Slice]) -> _Step:
        return _Step(sequences, self._runner.submit(StepPlan(slices)))


class _Step(NamedTuple):
    sequences: Sequence[LiveSequence]
    handle: StepHandle


def _read(step: _Step, guesses: dict[LiveSequence, list[int]]) -> None:
    for sequence, sampled in zip(step.sequences, step.handle.result().sampled, strict=True):
        assert sampled is not None
        guesses[sequence] += sampled.token_ids
