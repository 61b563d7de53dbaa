"""Is a replica slower than its siblings, which have the same model and the same kind of work? By how much is what its
share of the traffic is multiplied with, so that a failing device costs its users little before anybody has looked."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from penstock.watch.samples import Sample

_SLOW, _WELL = 0.75, 0.88  # of the siblings' speed: to be called slow, and to be forgiven
_IN_A_ROW = 3
_POOLED = 3  # periods
_MIN_STREAMS = 3  # in a period: fewer say nothing
MIN_SHARE = 0.1  # of a slow one: it must have some work, or nobody would see it recover


class Speed(NamedTuple):
    beside_siblings: float | None  # None: there is nobody to compare with, or too little was done
    is_slow: bool

    @property
    def penalty(self) -> float:
        """The factor on its share."""
        if not self.is_slow or self.beside_siblings is None:
            return 1.0
        return min(1.0, max(MIN_SHARE, self.beside_siblings))


class _Replica:
    def __init__(self) -> None:
        self.recent: deque[tuple[int, float]] = deque(maxlen=_POOLED)  # tokens and seconds
        self.row = 0
        self.speed = Speed(None, False)

    def pooled(self) -> float | None:
        seconds = sum(seconds for _, seconds in self.recent)
        return sum(tokens for tokens, _ in self.recent) / seconds if seconds > 0 else None


class Siblings:
    """The replicas of one model. Speed is tokens per second of one stream, after its first token."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}

    def speeds(self) -> dict[str, Speed]:
        return {name: replica.speed for name, replica in self._replicas.items()}

    def period(self, samples: Mapping[str, Sample]) -> None:
        """One is over; those that are not named have had no work."""
        told = {name: one for name, one in samples.items() if one.streams >= _MIN_STREAMS and one.decode_s > 0}
        now = {name: one.decoded / one.decode_s for name, one in told.items()}
        for name, sample in told.items():
            self._replicas.setdefault(name, _Replica()).recent.append((sample.decoded, sample.decode_s))
        for name, speed in now.items():
            others = [other for key, other in now.items() if key != name]
            if others:
                self._judge(self._replicas[name], speed / median(others), self._pooled_ratio(name))

    def forget(self, name: str) -> None:
        """It started anew, or is gone."""
        self._replicas.pop(name, None)

    def _pooled_ratio(self, name: str) -> float | None:
        others = [one.pooled() for key, one in self._replicas.items() if key != name]
        known, own = [speed for speed in others if speed], self._replicas[name].pooled()
        return own / median(known) if own and known else None

    @staticmethod
    def _judge(replica: _Replica, ratio: float, pooled: float | None) -> None:
        is_slow = replica.speed.is_slow
        is_other = ratio >= _WELL if is_slow else ratio < _SLOW
        replica.row = replica.row + 1 if is_other else 0
        if replica.row >= _IN_A_ROW:
            is_slow, replica.row = not is_slow, 0
        replica.speed = Speed(None if pooled is None else round(pooled, 3), is_slow)
