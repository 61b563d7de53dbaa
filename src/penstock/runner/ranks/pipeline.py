"""The first stage's runner of a pipeline: steps go through the stages one behind the other, several at a time.

Tokens are chosen by the last stage, and come back to the scheduler. A sequence whose token is not back yet waits, so
steps in flight have no sequence in common (`Scheduler`, `num_batches`).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.runner.ranks.leader import Leader
from penstock.runner.runner import RankRunner, in_step
from penstock.runner.step_inputs import encode_choices
from penstock.runner.verify import choices, outcome
from penstock.sched.plan import StepPlan, StepResult


@dataclass
class StagedStep:
    plan: StepPlan
    leader: Leader

    def choose(self) -> None:
        """Masks are known when a step is submitted: none of its sequences has a token in flight."""

    def result(self) -> StepResult:
        return outcome(self.plan.slices, self.leader.chosen())


class PipelineRunner:
    overlaps = True

    def __init__(self, own: RankRunner, leader: Leader) -> None:
        """`own`: of the first stage, on this rank."""
        self._own = own
        self._leader = leader

    def submit(self, plan: StepPlan) -> StagedStep:
        step = self._own.prepare(plan)
        self._leader.run(step, encode_choices(choices(plan.slices)))
        with in_step(self._leader.run):
            self._own.follow(step)
        return StagedStep(plan, self._leader)
