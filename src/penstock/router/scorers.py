"""Scorers of how good each replica is for a request: functions from (request, snapshots) to numbers in [0, 1].

A scorer does not know its weight, nor the other scorers; about some requests it has nothing to say. A new policy is a
new function, and a line in `strategies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from penstock.core.replica import ReplicaSnapshot
from penstock.core.request import Priority
from penstock.router.load import Load, saved_tokens
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest

Scorer = Callable[[EdgeRequest, Sequence[ReplicaSnapshot]], list[float] | None]

_HALF_AT_S = 0.2  # the default TTFT target: a replica that takes this long is half as good as an idle one
_SPREAD, _MASK = 0xFF51AFD7ED558CCD, (1 << 64) - 1
_SPREAD_LOW = 1 / 3  # of what the high get: with the default weight, between one and two times the load's own score
_GOLDEN = 0.6180339887498949  # its multiples are as evenly spread over [0, 1) as can be


def by_load(load: Load) -> Callable[[EdgeRequest, Sequence[ReplicaSnapshot]], list[float]]:
    """An absolute scale, so that a difference of a millisecond never weighs as much as one of a second."""
    queue, kv, output_weight = load.queue, load.kv_pressure, load.output

    def score(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float]:
        tokens = request.prompt_tokens
        output = output_weight * request.output_tokens if request.expected_output else 0.0
        return [
            _HALF_AT_S
            / (
                _HALF_AT_S
                + queue * r.queue_s
                + tokens / r.prefill_tokens_per_s
                + kv * r.kv_pressure
                + output * r.step_s
            )
            for r in replicas
        ]

    return score


least_loaded = by_load(Load())


def fewest_sequences(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float]:
    return [1.0 / (1 + replica.sequences) for replica in replicas]


def by_prefix(index: PrefixIndex, load: Load) -> Scorer:
    """Returns a scorer of what a replica's load score gains by the prefill that it need not do, since it holds the
    prompt's beginning; less what it takes to fetch of that what is in its host memory.

    With the score of the same load it adds up to that of the time that really remains: a match is worth what it saves,
    next to a long queue little, and a hot prefix gets a second home as soon as its first is busy for longer than that.
    A replica with more than its share of sequences gains nothing: answers under way make every step there longer, which
    no queue shows, so a hot prefix is spread before its home is slow.
    """

    base = by_load(load)

    def score(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float] | None:
        found = index.held(request.hashes, replicas) if request.hashes else None
        if not found:
            return None
        on_host = index.on_host(request.hashes, found)
        scores = [0.0] * len(replicas)
        loads = [replica.sequences for replica in replicas]
        bound = bounded_load(loads)
        at = [i for i, replica in enumerate(replicas) if replica.id in found and loads[i] < bound]
        for i, loaded in zip(at, base(request, [replicas[i] for i in at]), strict=True):
            replica = replicas[i]
            saved = saved_tokens(request, replica, found[replica.id], on_host.get(replica.id, 0))
            saved_s = saved / replica.prefill_tokens_per_s
            scores[i] = _HALF_AT_S / (_HALF_AT_S / loaded - saved_s) - loaded
        return scores

    return score


def by_priority(load: Load) -> Scorer:
    """Returns a scorer. For a high priority load counts once more; a low one is spread over replicas that are at worst
    half as good as the best, so that the best is free when somebody comes who needs it. For the normal one it is
    silent."""
    base = by_load(load)

    def score(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float] | None:
        if request.priority is Priority.NORMAL:
            return None
        scores = base(request, replicas)
        if request.priority is Priority.HIGH:
            return scores
        random01 = request.random01
        return [score * _SPREAD_LOW * ((random01 + i * _GOLDEN) % 1.0) for i, score in enumerate(scores)]

    return score


def bounded_load(loads: Sequence[int], load_factor: float = 1.25, slack: int = 4) -> int:
    """The number of sequences from which on a replica is passed over, though it would be the best for its cache:
    `load_factor` times the mean, and `slack`, so that small numbers scatter nothing."""
    return math.ceil(load_factor * (sum(loads) + 1) / len(loads)) + slack


def session_affinity(load_factor: float = 1.25, slack: int = 4) -> Scorer:
    """Consistent hashing with bounded load: 1 for the session's replica, 0 for the others.

    By rendezvous: every replica has a hash with the session and the highest wins, so one that leaves moves only its own
    sessions, and gateways agree without a shared ring. A replica beyond `bounded_load` is passed over for the next.
    """

    def score(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float] | None:
        if request.session is None:
            return None
        scores = [0.0] * len(replicas)
        session = _stable_hash(request.session)
        loads = [replica.sequences for replica in replicas]
        most = bounded_load(loads, load_factor, slack)
        # the product's high bits hang on all bits of both hashes; their plain XOR would order replicas by a bit or two
        ranks = [(session ^ _stable_hash(replica.id)) * _SPREAD & _MASK for replica in replicas]
        for index, load in enumerate(loads):
            if load >= most:
                ranks[index] = -1
        scores[ranks.index(max(ranks))] = 1.0
        return scores

    return score


def by_adapter(request: EdgeRequest, replicas: Sequence[ReplicaSnapshot]) -> list[float] | None:
    """1 where the request's adapter is on the device: elsewhere it has to be put there first, in another's place."""
    adapter = request.adapter
    return [float(adapter in replica.warm_adapters) for replica in replicas] if adapter else None


def unless_hashed(scorer: Scorer) -> Scorer:
    """A session is a guess about who has the beginning of a prompt. Where that is known nobody needs to guess."""
    return lambda request, replicas: None if request.hashes else scorer(request, replicas)


@lru_cache(maxsize=4096)
def _stable_hash(text: str) -> int:
    """The same in every process, unlike `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
