"""Signs of rollouts that somebody should look at: one that went back by itself, and one that does not go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.watch.alerts import Condition
from penstock.watch.kinds import ROLLOUT_ABORTED, ROLLOUT_STUCK
from penstock.watch.readings import RolloutReading

_ABORTED = ("aborting", "aborted")
_TOLD_S = 3600.0  # how long an abort is told of


def rollout_conditions(rollouts: Iterable[RolloutReading]) -> Iterator[Condition]:
    for one in rollouts:
        if one.phase in _ABORTED and not one.is_ordered and one.age_s < _TOLD_S:
            summary = f"{one.model}: the rollout of {one.new} was aborted: {one.reason}"
            yield Condition(kind=ROLLOUT_ABORTED, summary=summary, value=one.age_s, model=one.model)
        if one.limit_s is not None and one.age_s > one.limit_s:
            summary = f"{one.model}: the rollout of {one.new} has been {one.phase} for {one.age_s:.0f} s: {one.reason}"
            yield Condition(kind=ROLLOUT_STUCK, summary=summary, value=one.age_s, model=one.model)
