"""Times of steps of decodes, and how much longer each draft makes them; by how many sequences decode."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.sched.speculation.draft_budget import Outlook, capped, gain, worthwhile

_KEEP = 0.9  # of what was known, at every step
_KEEP_RARE = 0.5  # of what was known of steps without drafts, where they have become rare
_SPIKE = 2.0  # what takes so many times as long as usual is something else that the machine did
# Parts of a sequence's share of a step:
_MIN_SHARE = 0.05  # no draft costs less
_FIRST_SHARE = 0.2  # what one costs, before it was ever measured
_FAITH = 4.0  # as if so many had been
_MAX_CHANCE = 0.9  # where a draft must be surer than this to pay, nobody looks for one
_PLAIN_EVERY = 32  # steps with drafts; then one without, to know what they are measured against


class _Batch:
    """Measurements of steps with one number of sequences."""

    __slots__ = ("plain_s", "since_plain")

    def __init__(self) -> None:
        self.plain_s: float | None = None
        self.since_plain = 0


class StepCosts:
    def __init__(self) -> None:
        self._batches: dict[int, _Batch] = {}
        self._longer_s: dict[int, float] = {}  # by the batch's order of magnitude: all that drafts cost lately …
        self._drafts: dict[int, float] = {}  # … and how many they were

    def room(self, batch: int) -> int:
        return sys.maxsize

    def wants_plain(self, batch: int) -> bool:
        """A step without drafts is due."""
        known = self._batches.get(batch)
        return known is None or known.plain_s is None or known.since_plain >= _PLAIN_EVERY

    def knows_drafts(self, batch: int) -> bool:
        """Whether the cost of drafts was measured, with about as many sequences."""
        return batch.bit_length() in self._drafts

    def threshold(self, batch: int, num_drafts: int = 0, gains: float = 0.0) -> float:
        """Tokens that are made in the time which one more draft takes, in a step with so many that bring so much."""
        known = self._batches.get(batch)
        if known is None or known.plain_s is None:
            return 1.0
        draft_s = self._draft_s(batch, known.plain_s)
        return draft_s * (batch + gains) / (known.plain_s + num_drafts * draft_s)

    def most_drafts(self, batch: int, slowdown: float) -> int:
        """Number of drafts that make a step `slowdown` times as long."""
        known = self._batches.get(batch)
        if known is None or known.plain_s is None:
            return 0
        return int((slowdown - 1) * known.plain_s / self._draft_s(batch, known.plain_s))

    def can_pay(self, batch: int) -> bool:
        return self.threshold(batch) < _MAX_CHANCE

    def allot(self, outlooks: Sequence[Outlook], batch: int, slowdown: float) -> list[int]:
        """Twice: what a step brings, and so what its time is worth, depends on how many drafts it has."""
        counts = [0] * len(outlooks)
        for _ in range(2):
            gains = sum(gain(one.chance, count) for one, count in zip(outlooks, counts, strict=True))
            threshold = self.threshold(batch, sum(counts), gains)
            counts = [worthwhile(one.chance, threshold, one.most) for one in outlooks]
        least = min(map(gain, [one.chance for one in outlooks], counts)) if len(outlooks) == batch else 0.0
        return capped(counts, self.most_drafts(batch, slowdown * (1 + least)))

    def see(self, batch: int, counts: Sequence[int], seconds: float, *, is_ahead: bool = False) -> None:
        num_drafts = sum(counts)
        known = self._batches.setdefault(batch, _Batch())
        if num_drafts == 0:
            if known.plain_s is None:
                known.plain_s = seconds
            keep = _KEEP_RARE if known.since_plain >= _PLAIN_EVERY else _KEEP
            known.plain_s = keep * known.plain_s + (1 - keep) * min(seconds, _SPIKE * known.plain_s)
            known.since_plain = 0
            return
        known.since_plain += 1
        if known.plain_s is None:
            return
        draft_s, size = self._draft_s(batch, known.plain_s), batch.bit_length()
        longer_s = min(seconds, _SPIKE * (known.plain_s + num_drafts * draft_s)) - known.plain_s
        self._longer_s[size] = _KEEP * self._longer_s.get(size, _FAITH * draft_s) + longer_s
        self._drafts[size] = _KEEP * self._drafts.get(size, _FAITH) + num_drafts

    def _draft_s(self, batch: int, plain_s: float) -> float:
        size, share_s = batch.bit_length(), plain_s / batch
        if size not in self._drafts:
            return _FIRST_SHARE * share_s
        return max(_MIN_SHARE * share_s, self._longer_s[size] / self._drafts[size])
