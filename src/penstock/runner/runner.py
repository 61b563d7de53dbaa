"""The model runner: copies blocks, builds the batch, runs the model, samples. One call is one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV, Ops
from penstock.runner.inputs import build_batch
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover
from penstock.runner.sampler import sample
from penstock.runner.verify import choices, outcome
from penstock.sched.plan import StepPlan, StepResult


@dataclass(frozen=True)
class FinishedStep:
    """The handle of a device that works while it is called: the result is there already."""

    outcome: StepResult

    def choose(self) -> None:
        pass

    def result(self) -> StepResult:
        return self.outcome


class ModelRunner:
    overlaps = False

    def __init__(
        self,
        model: CausalLM,
        ops: Ops,
        kv: list[LayerKV],
        adapters: RunnerAdapters | None = None,
        mover: BlockMover | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._ops = ops
        self._kv = kv
        self._mover = mover or BlockMover(ops, kv)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> FinishedStep:
        if plan.copies:
            self._mover.move(plan.copies)
        if plan.placements and self._adapters is not None:
            self._adapters.place(plan.placements)
        logits = self._model(build_batch(plan.slices, self._ops.device), self._kv).float()
        return FinishedStep(outcome(plan.slices, sample(logits, choices(plan.slices))))
