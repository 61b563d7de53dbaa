"""The one order for running, waiting and preempting: class first, then turn, then arrival; the lowest runs first.

Streams that lost their replica go first of their class, before all tenants' turns: their clients look at an answer that
stands still. The one with fewest tokens to compute goes first of them, so that as many as possible move again soon. The
precedence is bounded: only a trusted gateway can name a stream as resumed, it ends with the first token made here, and
after three times `aging_s` a stream that still waits takes its tenant's turns like all others. Computed tokens are
charged to the tenant as always, and nobody gives way to a resumed stream who would not give way to a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import inf

from penstock.core.request import Priority
from penstock.sched.fairness import Share, Shares
from penstock.sched.sequence import Sequence

Rank = tuple[int, float, int]
_RESUMING_AGES = 3.0  # times `aging_s`: how long a resumed stream goes first at most
_BEFORE_ALL_TURNS = -float(1 << 52)  # a number of tokens can be added to it exactly


class Ranking:
    """A sequence gains a class for every `aging_s` it has been here, running or not, so nothing starves: sooner or
    later it is the oldest of the highest class, which goes first and is never preempted.

    With several tenants, age is no promotion, else the backlog of a greedy one would one day go before everybody. They
    take turns inside a class; and not more than once in `aging_s` the oldest sequence of all, if it has been here long
    enough to have come up through every class, goes before all others until it ends.
    """

    def __init__(self, aging_s: float, shares: Shares) -> None:
        self._aging_s = aging_s
        self._shares = shares
        self._elder: Sequence | None = None
        self._elder_s = -inf

    def look(self, sequences: Mapping[str, Sequence], now: float) -> None:
        """Decides before each step among several tenants whether the oldest sequence, the first given, goes first."""
        oldest = next(iter(sequences.values()))
        if oldest is self._elder:
            return
        self._elder = None
        overdue_s = self._aging_s * (oldest.request.priority + 1)
        if now - self._elder_s >= self._aging_s and now - oldest.arrival_s >= overdue_s:
            self._elder, self._elder_s = oldest, now

    def level(self, sequence: Sequence, now: float) -> int:
        if self._shares.is_contested:
            return -1 if sequence is self._elder else sequence.request.priority
        level = sequence.request.priority - int((now - sequence.arrival_s) / self._aging_s)
        return level if level > 0 else 0

    def goes_first(self, sequence: Sequence, now: float) -> bool:
        """It is a resumed stream whose client still waits for the first token from here."""
        return sequence.is_resuming and now - sequence.arrival_s < _RESUMING_AGES * self._aging_s

    def yields(self, sequence: Sequence, now: float) -> bool:
        """It is of the lowest class, and has not been here for long."""
        return sequence.request.priority >= Priority.LOW and now - sequence.arrival_s < self._aging_s

    def rank(self, sequence: Sequence, now: float) -> Rank:
        if sequence.is_resuming and self.goes_first(sequence, now):
            turn = _BEFORE_ALL_TURNS + sequence.num_known_elsewhere
        else:
            turn = sequence.share.virtual if self._shares.is_contested else 0.0
        return self.level(sequence, now), turn, sequence.order

    def last(self, running: Seq[Sequence], now: float) -> Sequence:
        """The sequence that gives way when blocks are short: the last comer, of the tenant furthest over its share."""
        if not self._shares.is_contested:
            return max(running, key=lambda s: self.rank(s, now))
        use = _once_each(running, self._shares.blocks)
        return max(running, key=lambda s: (self.level(s, now), use[s.share], s.order))

    def displaced(self, newcomer: Sequence, running: Seq[Sequence], now: float, *, by_place: bool) -> Sequence | None:
        """The sequence that gives way to a waiting one: one of a lower class, or one that has what the newcomer's share
        lent; None: none does. `by_place`: it is a place that is missing, and not blocks."""
        level = self.level(newcomer, now)
        if not self._shares.is_contested:
            victim = max(running, key=lambda s: self.rank(s, now), default=None)
            return victim if victim is not None and self.level(victim, now) > level else None
        use = _once_each(running, self._shares.places if by_place else self._shares.blocks)
        least = 1.0 if self._shares.have_room_for(newcomer) else inf
        victims = [s for s in running if (self.level(s, now), use[s.share]) > (level, least)]
        return max(victims, key=lambda s: (self.level(s, now), use[s.share], s.order), default=None)


def _once_each(running: Seq[Sequence], use: Callable[[Share], float]) -> dict[Share, float]:
    return {share: use(share) for share in {s.share for s in running}}
