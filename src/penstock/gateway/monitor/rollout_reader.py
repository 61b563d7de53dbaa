"""Rollouts, as the store has them, as metrics and as the watch reads them. Belongs to the event loop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.observe import rollout_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Labels, Registry
from penstock.rollout.policy.state import Phase, RolloutState
from penstock.rollout.runner import gates_of, state_of
from penstock.tenancy.rollouts import Rollout
from penstock.watch.readings import RolloutReading

_STUCK_S = 1800.0  # paused, waiting for capacity, or going back
_LATE_S = 600.0  # beyond a step's limit, or the hold's
_TOLD_S = 3600.0  # how long one that is over is read


class RolloutReader:
    def __init__(self, exports: list[Registry], clock: Callable[[], float] = time.time) -> None:
        """`exports`: its metrics are added when there is a rollout."""
        self._exports = exports
        self._registry = Registry(catalog.ROLLOUT_CATALOG)
        self._clock = clock
        self._found: list[tuple[Rollout, RolloutState]] = []  # that are on, or ended lately
        self._ended: Counter[tuple[str, str]] = Counter()  # by model and outcome

    def apply(self, found: Sequence[Rollout]) -> None:
        """All that the store keeps. What another version of penstock wrote is left out."""
        now, self._found = self._clock(), []
        self._ended = Counter((one.model, one.phase) for one in found if one.is_over)
        for one in found:
            if one.is_over and now - (one.ended_at or 0.0) > _TOLD_S:
                continue
            try:
                self._found.append((one, state_of(one)))
            except (ValueError, TypeError):
                continue
        if found and self._registry not in self._exports:
            self._exports.append(self._registry)
        if self._registry in self._exports:
            self._take_down()

    def readings(self) -> list[RolloutReading]:
        now = self._clock()
        return [
            RolloutReading(
                model=one.model,
                id=one.id,
                new=one.new,
                phase=one.phase,
                age_s=now - state.since,
                limit_s=_limit_s(state),
                reason=state.reason,
                is_ordered=one.is_ordered,
            )
            for one, state in self._found
            if not one.is_over or now - state.since < _TOLD_S
        ]

    def _take_down(self) -> None:
        on = [(one, state) for one, state in self._found if not one.is_over]
        gates = Counter((one.model, str(gate.verdict)) for one, _ in on for gate in gates_of(one))
        values: dict[Metric, dict[Labels, float]] = {
            catalog.PHASE: {(one.model, one.phase): 1 for one, _ in on},
            catalog.STEP: {(one.model,): state.step + 1 for one, state in on},
            catalog.SHARE: {(one.model,): _share(state) for one, state in on},
            catalog.GATES: {key: float(number) for key, number in gates.items()},
            catalog.ENDED: {key: float(number) for key, number in self._ended.items()},
        }
        for metric, found in values.items():
            self._registry.replace(metric, found)


def _share(state: RolloutState) -> float:
    if state.step_in_force is None or state.phase is Phase.ABORTING:
        return 0.0
    return state.plan.steps[state.step_in_force].share or 0.0


def _limit_s(state: RolloutState) -> float | None:
    if state.is_over:
        return None
    if state.phase is Phase.HOLDING:
        return max(0.0, state.hold_until - state.since) + _LATE_S
    return state.current_step.max_s + _LATE_S if state.phase is Phase.WATCHING else _STUCK_S
