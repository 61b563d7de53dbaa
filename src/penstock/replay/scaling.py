"""Recorded rounds of the autoscaling policy, put to other policies: what each would have decided with what was seen.

Each round stands by itself: replicas, demand and the policy's memory are as they were recorded, whatever another policy
would have done before. So the recorded policy decides exactly as it did. What would have become of a pool under another
one over hours is the simulator's to say: `penstock fleet what-if`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.rounds import PolicyRound
from penstock.fleet.settings import PoolSettings

Decide = Callable[[PolicyRound], Decision]
_MAX_APART_S = 120.0  # two rounds; a longer time between them had no controller, and is not counted


class Difference(Struct, frozen=True):
    """Rounds in a row in which another policy wanted the same other number."""

    begins_at: float
    ends_at: float
    num_rounds: int
    recorded: Decision  # of the first of them, with the reason that held
    other: Decision


class Replayed(Struct, frozen=True):
    """A policy's decisions over all rounds. Shares are of rounds."""

    name: str
    same: float
    more: float  # active replicas than recorded
    fewer: float
    mean_wanted: float
    most_wanted: int
    differences: tuple[Difference, ...] = ()  # oldest first


class ScalingReplay(Struct, frozen=True):
    pool: str
    begins_at: float
    ends_at: float
    num_rounds: int
    num_decisions: int  # rounds that acted or changed the number wanted
    num_exact: int  # rounds that the recorded policy, asked again, decides exactly as it did
    recorded: Replayed
    policies: tuple[Replayed, ...]


def replay_rounds(rounds: Sequence[PolicyRound], policies: Mapping[str, Decide]) -> ScalingReplay:
    """`rounds` of one pool, oldest first; one at least."""
    recorded, again = _with_reasons(rounds), DecideAgain()
    return ScalingReplay(
        recorded[0].pool,
        recorded[0].at,
        recorded[-1].at,
        len(rounds),
        sum(bool(each.decision.reason) for each in rounds),
        sum(again(each) == each.decision for each in rounds),
        _replayed("recorded", recorded, recorded),
        tuple(_replayed(name, recorded, [decide(each) for each in rounds]) for name, decide in policies.items()),
    )


class DecideAgain:
    """The policy that was recorded, as this version of it decides; or the same with other settings."""

    def __init__(self, settings: PoolSettings | None = None, slo: Slo | None = None) -> None:
        self._settings, self._slo = settings, slo
        self._policy: PoolPolicy | None = None
        self._made_from: tuple[object, ...] = ()

    def __call__(self, recorded: PolicyRound) -> Decision:
        made_from = recorded.settings, recorded.slo, recorded.costs
        if self._policy is None or made_from != self._made_from:  # a policy keeps answers that take long to reckon
            self._policy, self._made_from = recorded.policy(self._settings, self._slo), made_from
        return self._policy.decide(recorded.observation, recorded.memory, recorded.decision.at)[0]


def _with_reasons(rounds: Sequence[PolicyRound]) -> list[Decision]:
    """Decisions with the reason that holds: a round in which nothing changes names none."""
    found, reason = [], ""
    for each in rounds:
        reason = each.decision.reason or reason
        found.append(replace(each.decision, reason=reason))
    return found


def _replayed(name: str, recorded: Sequence[Decision], others: Sequence[Decision]) -> Replayed:
    pairs = list(zip(recorded, others, strict=True))
    lasting = [min(_MAX_APART_S, after.at - each.at) for each, after in pairwise(recorded)] + [1.0]
    return Replayed(
        name,
        sum(_essence(one) == _essence(other) for one, other in pairs) / len(pairs),
        sum(other.wanted > one.wanted for one, other in pairs) / len(pairs),
        sum(other.wanted < one.wanted for one, other in pairs) / len(pairs),
        sum(each.wanted * seconds for each, seconds in zip(others, lasting, strict=True)) / sum(lasting),
        max(each.wanted for each in others),
        tuple(_differences(pairs)),
    )


def _differences(pairs: Sequence[tuple[Decision, Decision]]) -> list[Difference]:
    found: list[Difference] = []
    is_open = False
    for index, (one, other) in enumerate(pairs):
        ends_at = pairs[min(index + 1, len(pairs) - 1)][0].at
        if _essence(one) == _essence(other):
            is_open = False
        elif is_open and (one.wanted, other.wanted) == (found[-1].recorded.wanted, found[-1].other.wanted):
            found[-1] = replace(found[-1], ends_at=ends_at, num_rounds=found[-1].num_rounds + 1)
        else:
            found.append(Difference(one.at, ends_at, 1, one, other))
            is_open = True
    return found


def _essence(decision: Decision) -> tuple[object, ...]:
    """Numbers and actions, without reasons."""
    actions = [(each.kind, each.replica, each.to, each.zone, each.capacity_type) for each in decision.actions]
    return decision.wanted, decision.standby, decision.parked, actions
