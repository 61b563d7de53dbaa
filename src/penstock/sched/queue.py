"""Sequences that wait: one first-come queue per priority class, and age that moves a sequence up the classes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from penstock.core.request import Priority
from penstock.sched.sequence import Sequence

Rank = tuple[int, int]


class Ranking:
    """The one order for running, waiting and preempting: class first, then arrival; the lowest runs first.

    A sequence gains a class for every `aging_s` it has been here, running or not, so nothing starves: sooner or later
    it is the oldest of the highest class, which goes first and is never preempted.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s

    def level(self, sequence: Sequence, now: float) -> int:
        return max(0, sequence.request.priority - int((now - sequence.arrival_s) / self._aging_s))

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return self.level(sequence, now), sequence.order


class WaitingQueue:
    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._classes: dict[Priority, list[Sequence]] = {priority: [] for priority in Priority}
        self.num_tokens = 0  # of all who wait, counted as they came in
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for members in self._classes.values():
            yield from members

    def add(self, sequence: Sequence) -> None:
        """Into its class by arrival, so one that was preempted goes back to the place it came from."""
        insort(self._classes[sequence.request.priority], sequence, key=lambda s: s.order)
        self._tokens[sequence.request.id] = len(sequence.token_ids)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        self._classes[sequence.request.priority].remove(sequence)
        self.num_tokens -= self._tokens.pop(sequence.request.id)

    def first(self, count: int, now: float) -> list[Sequence]:
        """Up to `count` sequences, best rank first."""
        heads = [s for members in self._classes.values() for s in members[:count]]
        heads.sort(key=lambda s: self._ranking.rank(s, now))
        return heads[:count]
