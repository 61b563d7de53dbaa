"""Many steps under way at once, in all of which everybody decodes: when each of them ends, and what they come to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from penstock.engine.step_log import StepShape


class SteadyRun:
    __slots__ = ("_began_s", "_context", "_decodes", "_ends")

    def __init__(self, first: StepShape, seconds: Sequence[float], now: float) -> None:
        self._began_s = now
        self._decodes, self._context = first.decodes, first.decode_context
        self._ends = list(accumulate(seconds, initial=now))[1:]

    @property
    def end_s(self) -> float:
        return self._ends[-1]

    def __len__(self) -> int:
        return len(self._ends)

    def num_done(self, now: float) -> int:
        return bisect_right(self._ends, now)

    def keep(self, count: int) -> bool:
        """The first `count` of them only; False: there are no more."""
        if count >= len(self._ends):
            return False
        del self._ends[count:]
        return True

    def waits(self, first_submitted_s: float | None) -> Iterator[float]:
        """Returns how long before its end each step was submitted. `first_submitted_s`: when the first was, on a device
        where each is submitted when the one before it begins; None: each is submitted when it begins itself."""
        begins = [self._began_s, *self._ends]
        submitted = begins if first_submitted_s is None else [first_submitted_s, *begins]
        return (end - begin for begin, end in zip(submitted, self._ends, strict=False))

    def costs(self) -> list[float]:
        return [end - begin for begin, end in pairwise([self._began_s, *self._ends])]

    @property
    def last_begin_s(self) -> float:
        return self._ends[-2] if len(self._ends) > 1 else self._began_s

    @property
    def following(self) -> StepShape:
        """The step after them."""
        return StepShape(0, 0, self._decodes, self._context + len(self._ends) * self._decodes)

    @property
    def sum(self) -> StepShape:
        """All of them together."""
        count, decodes = len(self._ends), self._decodes
        return StepShape(0, 0, count * decodes, count * self._context + decodes * count * (count - 1) // 2)
