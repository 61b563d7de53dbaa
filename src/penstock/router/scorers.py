"""How good each replica is for a request: functions from (request, snapshots) to numbers in [0, 1].

A scorer does not know its weight, nor the other scorers. A new policy is a new function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from penstock.core.replica import ReplicaSnapshot
from penstock.router.load import load_s
from penstock.router.request import EdgeRequest

Scorer = Callable[[EdgeRequest, Sequence[ReplicaSnapshot]], list[float]]

_HALF_AT_S = 0.2  # the default TTFT target: a replica that takes this long is half as good as an idle one
_SPREAD, _MASK = 0xFF51AFD7ED558CCD, (1 << 64) - 1


def least_loaded(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float]:
    """An absolute scale, so that a difference of a millisecond never weighs as much as one of a second."""
    return [_HALF_AT_S / (_HALF_AT_S + load_s(request, replica)) for replica in replicas]


def session_affinity(load_factor: float = 1.25, slack: int = 4) -> Scorer:
    """Consistent hashing with bounded load: 1 for the session's replica, 0 for the others.

    By rendezvous: every replica has a hash with the session and the highest wins, so one that leaves moves only its own
    sessions, and gateways agree without a shared ring. A replica that holds more than `load_factor` times the mean
    number of sequences (and `slack`, so that small numbers do not scatter a session) is passed over for the next.
    """

    def score(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float]:
        scores = [0.0] * len(replicas)
        if request.session is None:
            return scores
        session = _stable_hash(request.session)
        loads = [replica.sequences for replica in replicas]
        most = math.ceil(load_factor * (sum(loads) + 1) / len(loads)) + slack
        # the product's high bits hang on all bits of both hashes; their plain XOR would order replicas by a bit or two
        ranks = [(session ^ _stable_hash(replica.id)) * _SPREAD & _MASK for replica in replicas]
        for index, load in enumerate(loads):
            if load >= most:
                ranks[index] = -1
        scores[ranks.index(max(ranks))] = 1.0
        return scores

    return score


@lru_cache(maxsize=4096)
def _stable_hash(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
