"""How fast the replicas of a pool are, as far as that should tell them apart.

Replicas on equal machines measure speeds that differ by a little, and one that has had no work has measured none. If
that decided, the first to be measured, or the luckiest, would get everything: so whoever is about as fast as the rest,
or may be, counts as the rest.
"""

from __future__ import annotations

_ALIKE = 0.25  # of the mean


class Speeds:
    """Prefill, in tokens per second."""

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}
        self._mean = 0.0

    def seen(self, replica_id: str, measured: float | None, otherwise: float) -> float:
        """What to reckon with; `otherwise`: if nobody has measured anything yet."""
        if measured is not None and self._measured.get(replica_id) != measured:
            self._measured[replica_id] = measured
            self._mean = sum(self._measured.values()) / len(self._measured)
        if not self._measured:
            return otherwise
        if measured is None or abs(measured - self._mean) <= _ALIKE * self._mean:
            return self._mean
        return measured

    @property
    def is_empty(self) -> bool:
        return not self._measured

    def forget(self, replica_id: str) -> None:
        if self._measured.pop(replica_id, None) is not None:
            self._mean = sum(self._measured.values()) / max(1, len(self._measured))
