"""The model runner: copies blocks, builds the batch, runs the model, samples. One call is one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV, Ops
from penstock.runner.inputs import build_batch
from penstock.runner.sampler import sample
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

    def __init__(self, model: CausalLM, ops: Ops, kv: list[LayerKV]) -> None:
        self._model = model
        self._ops = ops
        self._kv = kv

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> FinishedStep:
        if plan.copies:
            self._ops.copy_blocks(self._kv, plan.copies)
        logits = self._model(build_batch(plan.slices, self._ops.device), self._kv).float()
        sampled = iter(sample(logits, [s.sample for s in plan.slices if s.sample is not None]))
        return FinishedStep(StepResult([next(sampled) if s.sample is not None else None for s in plan.slices]))
