"""The named ways to choose among replicas: which scorers with which weights, and who picks.

A new scorer is a function in `scorers` and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from penstock.core.replica import UNBOUNDED, ReplicaSnapshot
from penstock.router.load import Load, Weight
from penstock.router.pickers import Picker, best, power_of_two
from penstock.router.prefix_index import UNKNOWN_CAPACITY_BLOCKS, PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.scorers import (
    Scorer,
    by_adapter,
    by_load,
    by_prefix,
    by_priority,
    fewest_sequences,
    session_affinity,
    unless_hashed,
)
from penstock.router.turns import Turns, observed_speed

StrategyName = Literal[
    "kv_aware", "token_aware", "session", "least_connections", "power_of_two", "weighted", "round_robin"
]


@dataclass(frozen=True)
class Weights:
    """Weights of the scores that a strategy adds up, and of what its load is made of."""

    prefix: Weight = 3.0  # at 1 a match is worth the time it saves this request; the rest is what it saves others
    session: Weight = 2.0  # more than any load: a session's replica wins while bounded load lets it
    priority: Weight = 3.0  # as `prefix`: a high class does not wait for the sake of those behind it
    adapter: Weight = 0.3  # of one that is on the device: less than a queue, more than a draw
    load: Load = field(default_factory=Load)


class Weighted(NamedTuple):
    name: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    scorers: tuple[Weighted, ...]
    picker: Picker = best
    index: PrefixIndex | None = None  # what its scores of prefixes come from
    routed: Callable[[EdgeRequest, ReplicaSnapshot, float], None] | None = None  # told of every request that is sent
    load: Load = field(default_factory=Load)  # what its seconds count for, for those who reckon in them too
    spreads_equals: bool = False  # among equals the one that has worked least is picked, and not the drawn one


def kv_aware(weights: Weights, index: PrefixIndex) -> Strategy:
    """The least time to a first token, by what each replica holds of the prompt, its queues and its KV cache."""

    def routed(request: EdgeRequest, replica: ReplicaSnapshot, now: float) -> None:
        capacity = replica.limits.kv_capacity_tokens
        most = capacity // request.block_tokens if capacity < UNBOUNDED else UNKNOWN_CAPACITY_BLOCKS
        if request.hashes:
            index.predicted(replica.id, request.hashes, now, most)

    return Strategy(
        "kv_aware",
        (
            Weighted("least_loaded", 1.0, by_load(weights.load)),
            Weighted("prefix", weights.prefix, by_prefix(index, weights.load)),
            Weighted("priority", weights.priority, by_priority(weights.load)),
            Weighted("adapter", weights.adapter, by_adapter),
            Weighted("session", weights.session, unless_hashed(session_affinity())),
        ),
        index=index,
        routed=routed,
        spreads_equals=True,
    )


def token_aware(weights: Weights, index: PrefixIndex) -> Strategy:
    """Queued prefill tokens by the prefill speed, active decode tokens by the step and the KV cache that they make."""
    return Strategy(
        "token_aware",
        (
            Weighted("least_loaded", 1.0, by_load(weights.load)),
            Weighted("priority", weights.priority, by_priority(weights.load)),
            Weighted("adapter", weights.adapter, by_adapter),
        ),
    )


def session(weights: Weights, index: PrefixIndex) -> Strategy:
    """Consistent hashing of sessions with bounded load; by load where there is no session."""
    return Strategy(
        "session",
        (
            Weighted("least_loaded", 1.0, by_load(weights.load)),
            Weighted("session", weights.session, session_affinity()),
        ),
    )


def least_connections(weights: Weights, index: PrefixIndex) -> Strategy:
    return Strategy("least_connections", (Weighted("fewest_sequences", 1.0, fewest_sequences),))


def two_drawn(weights: Weights, index: PrefixIndex) -> Strategy:
    """Returns a strategy for many gateways that share no news: the less loaded of two replicas drawn by chance."""
    return Strategy("power_of_two", (Weighted("least_loaded", 1.0, by_load(weights.load)),), picker=power_of_two)


def weighted(weights: Weights, index: PrefixIndex) -> Strategy:
    """Returns a strategy of turns, as often as each replica's observed speed allows."""
    turns = Turns(observed_speed)
    return Strategy("weighted", (Weighted("turn", 1.0, turns.score),), routed=turns.routed)


def round_robin(weights: Weights, index: PrefixIndex) -> Strategy:
    turns = Turns()
    return Strategy("round_robin", (Weighted("turn", 1.0, turns.score),), routed=turns.routed)


STRATEGIES: dict[StrategyName, Callable[[Weights, PrefixIndex], Strategy]] = {
    "kv_aware": kv_aware,
    "token_aware": token_aware,
    "session": session,
    "least_connections": least_connections,
    "power_of_two": two_drawn,
    "weighted": weighted,
    "round_robin": round_robin,
}


@dataclass(frozen=True)
class RoutingSettings:
    """Routing settings of a gateway, or of one model: `routing: {strategy: kv_aware, weights: {prefix: 3}}`."""

    strategy: StrategyName = "kv_aware"
    weights: Weights = field(default_factory=Weights)

    def build(self, index: PrefixIndex) -> Strategy:
        return replace(STRATEGIES[self.strategy](self.weights, index), load=self.weights.load)
