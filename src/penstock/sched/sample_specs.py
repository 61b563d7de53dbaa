"""How a sequence's next token is to be chosen, and those after it if what was drafted for them holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

from penstock.sched.plan import SampleSpec
from penstock.sched.sequence import Sequence as LiveSequence


def choice_of(sequence: LiveSequence) -> SampleSpec:
    """Of the token after all that are known or in flight."""
    request, guide = sequence.request, sequence.guide
    generated = sequence.num_generated + sequence.num_in_flight
    return SampleSpec(
        params=request.sampling,
        history=sequence.token_ids,
        prompt_len=sequence.prompt_len,
        position=sequence.prompt_len + generated,
        banned_ids=request.stop_token_ids if generated < request.min_tokens and guide is None else (),
        mask=guide,
    )


def choices_after(sequence: LiveSequence, first: SampleSpec, drafts: Sequence[int]) -> list[SampleSpec]:
    """Of the token after each draft. They are chosen as if every draft before them had been: by the random number of
    their own place, and by what may come there."""
    request = sequence.request
    masks = sequence.guide.ahead(drafts) if sequence.guide is not None else [None] * len(drafts)
    choices = []
    for count, mask in enumerate(masks, 1):
        is_early = first.position - sequence.prompt_len + count < request.min_tokens
        choices.append(
            SampleSpec(
                params=first.params,
                history=Continued(first.history, drafts, count),
                prompt_len=first.prompt_len,
                position=first.position + count,
                banned_ids=request.stop_token_ids if is_early and mask is None else (),
                mask=mask,
            )
        )
    return choices


class Continued(Sequence[int]):
    """A list of tokens and some drafts after it. The list may be long, so it is not copied."""

    __slots__ = ("_count", "_drafts", "_known")

    def __init__(self, known: Sequence[int], drafts: Sequence[int], count: int) -> None:
        self._known = known
        self._drafts = drafts
        self._count = count

    def __len__(self) -> int:
        return len(self._known) + self._count

    def __iter__(self) -> Iterator[int]:
        return chain(self._known, self._drafts[: self._count])

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        known = len(self._known)
        if isinstance(at, int):
            at = range(len(self))[at]
            return self._known[at] if at < known else self._drafts[at - known]
        start, stop, step = at.indices(len(self))
        assert step == 1
        return [*self._known[start:stop], *self._drafts[max(0, start - known) : max(0, stop - known)]]
