"""The speeds of the replicas of a pool, as far as those should tell them apart.

A replica's measure of a moment is the speed of its prompts as much as its own: long ones, and those beside many
answers, are slower on the same device. Equal replicas differ by that, and one that has had no work has
measured nothing. If that decided, the luckiest would get everything, and a replica would be avoided for the prompts
that it had. So a replica counts by its mean over many reports, as the rest while there are few of them, and one that is
about as fast as the rest counts as the rest.
"""

from __future__ import annotations

_ALIKE = 0.25  # of the pool's mean
_SWING = 4.0  # times: more than this is no matter of prompts, but a device that throttles
_TRUST = 50  # reports of a replica that count as much as the pool's mean
_MEMORY = 500  # reports that a mean goes back


class _Measured:
    """The reports of one replica."""

    __slots__ = ("count", "last", "mean")

    def __init__(self) -> None:
        self.count, self.last, self.mean = 0, 0.0, 0.0

    @property
    def sum(self) -> float:
        return self.count * self.mean


class Speeds:
    """Prefill, in tokens per second."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Measured] = {}
        self._sum, self._count = 0.0, 0  # of all their reports

    def seen(self, replica_id: str, measured: float | None, otherwise: float) -> float:
        """Returns the speed to reckon with; `otherwise`: if nobody has measured anything yet."""
        replica = self._replicas.get(replica_id)
        if measured is not None and (replica is None or replica.last != measured):
            replica = self._learn(replica_id, measured)
        if not self._count:
            return otherwise
        mean = self._sum / self._count
        if replica is None or measured is None:
            return mean
        own = mean + (replica.mean - mean) * replica.count / (replica.count + _TRUST)
        if replica.count > _TRUST and not own / _SWING <= measured <= own * _SWING:
            return measured
        return mean if abs(own - mean) <= _ALIKE * mean else own

    def _learn(self, replica_id: str, measured: float) -> _Measured:
        replica = self._replicas.setdefault(replica_id, _Measured())
        self.forget(replica_id)
        replica.last, replica.count = measured, min(replica.count + 1, _MEMORY)
        replica.mean += (measured - replica.mean) / replica.count
        self._replicas[replica_id] = replica
        self._sum, self._count = self._sum + replica.sum, self._count + replica.count
        return replica

    @property
    def is_empty(self) -> bool:
        return not self._replicas

    def forget(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            self._sum, self._count = self._sum - replica.sum, self._count - replica.count
