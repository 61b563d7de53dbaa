"""The simulated device: it computes nothing, answers every sequence with the same token, and tells what a step is made
of, by which the replica reckons how long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from penstock.engine.engine import Step
from penstock.engine.step_log import StepShape, shape_of
from penstock.sched.plan import Sampled, StepPlan, StepResult

TOKEN = 0
_SAMPLED = Sampled([TOKEN])


@dataclass(frozen=True, slots=True)
class SimStep:
    """A step on the simulated device."""

    plan: StepPlan
    shape: StepShape

    def choose(self) -> None:
        pass

    def result(self) -> StepResult:
        return StepResult([_SAMPLED if piece.sample is not None else None for piece in self.plan.slices])


@dataclass
class SimRunner:
    overlaps: bool

    def submit(self, plan: StepPlan) -> SimStep:
        return SimStep(plan, shape_of(plan))


def shape_in(step: Step) -> StepShape:
    return cast(SimStep, step.handle).shape
