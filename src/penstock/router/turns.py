"""Taking turns: who was passed over longest is next, the fast more often than the slow.

Each replica has a time of its own that moves on by 1/weight when it is picked, and the one that is furthest behind is
next. So it does not matter who is a candidate in which pick, as it would for a place in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.replica import ReplicaSnapshot
from penstock.router.request import EdgeRequest

_MOST = 4096  # replicas remembered; then those that have nothing to wait for are forgotten


def equal(replica: ReplicaSnapshot) -> float:
    return 1.0


def observed_speed(replica: ReplicaSnapshot) -> float:
    """Returns the prompts of a thousand tokens with an answer of its mean length that a replica does per second."""
    answer_s = replica.mean_output_tokens / replica.decode_tokens_per_s
    return 1.0 / (1000.0 / replica.prefill_tokens_per_s + answer_s)


class Turns:
    def __init__(self, weight: Callable[[ReplicaSnapshot], float] = equal) -> None:
        self._weight = weight
        self._times: dict[str, float] = {}
        self._now = 0.0  # where the last pick was: who is new, or was away, begins here and has nothing to catch up

    def score(self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float]:
        times = [self._times.get(replica.id, self._now) for replica in replicas]
        first = min(times)
        return [1.0 / (1.0 + time - first) for time in times]

    def routed(self, request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> None:
        self._now = max(self._now, self._times.get(replica.id, 0.0))
        if len(self._times) >= _MOST:
            self._times = {name: t for name, t in self._times.items() if t > self._now}
        self._times[replica.id] = self._now + 1.0 / self._weight(replica)
