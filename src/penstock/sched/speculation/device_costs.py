"""Cost of drafts on a device that is otherwise given steps ahead of results, and how many are worth it.

A step with drafts is longer in three ways: the device waits, since what comes after drafts is planned only once they
are read; a proposer that drafts one after the other takes as long as the longest of them; and every draft is one more
row. The three are fitted to what steps took, as shares of a step without drafts, by about as many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sched.speculation.draft_budget import Outlook, capped, gain, worthwhile

_KEEP = 0.9  # of what was known of a step without drafts, at every one
_SPIKE = 2.0  # what takes so many times as long as expected is something else that the machine did
_PLAIN_EVERY = 128  # steps with drafts; then some without, to know what they are measured against
_FORGET = 0.97  # of what was seen of drafts, when more is
# Before anything is measured: what waiting, each draft in a row, and a row of each sequence take, and how much is
# believed of that.
_PRIOR = (0.15, 0.05, 0.05)
_FAITH = (1.0, 2.0, 4.0)
_MIN_GAIN = 1.03  # times the tokens per second: for less nobody waits
_MAX_CHANCE = 0.9  # where a draft must be surer than this to be worth its row, nobody looks for one

Vector = tuple[float, float, float]


class DeviceCosts:
    def __init__(self, most_rows: int) -> None:
        """`most_rows`: of a step with drafts."""
        self._most_rows = most_rows
        self._plain_s: dict[int, float] = {}
        self._since_plain = 0
        self._fits: dict[int, _Fit] = {}

    def room(self, batch: int) -> int:
        return max(0, self._most_rows - batch)

    def wants_plain(self, batch: int) -> bool:
        return _about(batch) not in self._plain_s or self._since_plain >= _PLAIN_EVERY

    def knows_drafts(self, batch: int) -> bool:
        return batch.bit_length() in self._fits

    def can_pay(self, batch: int) -> bool:
        return self._shares(batch)[2] < _MAX_CHANCE

    def see(self, batch: int, counts: Sequence[int], seconds: float, *, is_ahead: bool) -> None:
        about = _about(batch)
        plain_s = self._plain_s.get(about)
        if not counts:
            if is_ahead:  # else it waited for the one before, as no step without drafts need
                known_s = plain_s or seconds
                self._plain_s[about] = _KEEP * known_s + (1 - _KEEP) * min(seconds, _SPIKE * known_s)
                self._since_plain = 0
            return
        self._since_plain += 1
        if plain_s is not None:
            x = (1.0, float(max(counts)), sum(counts) / batch)
            most = _SPIKE * (1 + _dot(x, self._shares(batch)))
            self._fits.setdefault(batch.bit_length(), _Fit()).see(x, min(seconds / plain_s, most) - 1)

    def allot(self, outlooks: Sequence[Outlook], batch: int, slowdown: float) -> list[int]:
        """All up to one depth, where each row is worth its own time: that depth at which most tokens are made."""
        wait, deeper, row = self._shares(batch)
        likely = [worthwhile(one.chance, row, one.most) for one in outlooks]
        best, best_rate = [0] * len(outlooks), _MIN_GAIN * batch
        for depth in range(1, max(likely, default=0) + 1):
            counts = capped([min(count, depth) for count in likely], self.room(batch))
            gains = [one.weight * gain(one.chance, count) for one, count in zip(outlooks, counts, strict=True)]
            longer = 1 + wait + deeper * max(counts) + row * sum(counts) / batch
            least = min(gains) if len(gains) == batch else 0.0
            rate = (batch + sum(gains)) / longer
            if rate > best_rate and longer <= slowdown * (1 + least):
                best, best_rate = counts, rate
        return best

    def _shares(self, batch: int) -> Vector:
        fit = self._fits.get(batch.bit_length())
        return fit.shares if fit is not None else _PRIOR


class _Fit:
    """Least squares that forget, held near what is believed at first."""

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self.shares: Vector = _PRIOR

    def see(self, x: Vector, share: float) -> None:
        for i in range(3):
            for j in range(3):
                self._products[i][j] = _FORGET * self._products[i][j] + x[i] * x[j]
            self._sums[i] = _FORGET * self._sums[i] + x[i] * share
        rows = [
            [self._products[i][j] + _FAITH[i] * (i == j) for j in range(3)] + [self._sums[i] + _FAITH[i] * _PRIOR[i]]
            for i in range(3)
        ]
        first, second, third = _solved(rows)
        self.shares = max(first, 0.0), max(second, 0.0), max(third, 0.0)


def _solved(rows: list[list[float]]) -> list[float]:
    """Solution of linear equations whose matrix is positive definite, so that no pivot is zero."""
    for i, row in enumerate(rows):
        for other in rows:
            if other is not row:
                factor = other[i] / row[i]
                for j in range(i, 4):
                    other[j] -= factor * row[j]
    return [row[3] / row[i] for i, row in enumerate(rows)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _about(batch: int) -> int:
    """Batches that take as long as each other without drafts, or nearly."""
    return batch if batch <= 4 else -(-batch // 8) * 8
