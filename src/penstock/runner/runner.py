"""The model runner: copies blocks, builds the batch, runs the model, samples. One call is one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.model_config import ModelConfig
from penstock.core.ranks import RankLost
from penstock.model.batch import ImageRows, LayerState
from penstock.model.layers import CausalLM
from penstock.model.ops import LayerKV, Ops
from penstock.model.states import copy_states
from penstock.runner.images import ImageTable
from penstock.runner.lora import RunnerAdapters
from penstock.runner.moving import BlockMover
from penstock.runner.sampler import sample
from penstock.runner.step_inputs import StepInputs, host_batch, pack
from penstock.runner.step_meter import StepMeter
from penstock.runner.verify import choices, outcome
from penstock.sched.plan import Runner, Sampled, SampleSpec, StepPlan, StepResult

Tell = Callable[[StepInputs], None]  # hands a step to all other ranks


@contextmanager
def in_step(tell: Tell | None) -> Iterator[None]:
    """The first rank's part of a step. Its failure ends all other ranks: they are in the middle of the same step, and
    would meet the next one's collectives there."""
    try:
        yield
    except Exception as error:
        if tell is None:
            raise
        raise RankLost(0, f"its part of a step failed: {error!r}") from error


def merge_size_of(config: ModelConfig) -> int:
    """Patches of an image that become one token, where these are rotated in three directions; 0: they are not."""
    return config.vision.merge_size if config.vision is not None and config.rope_sections else 0


def taken(images: ImageTable | None, step: StepInputs) -> ImageRows | None:
    """The embeddings of images that a step puts in; what it is to encode is encoded before."""
    if images is None or not step.images:
        return None
    images.update(step.images)
    return images.rows(step.images.parts)


class RankRunner(Runner, Protocol):
    """A runner of a model that may be spread over ranks: the first one submits, the others follow."""

    meter: StepMeter

    def lead(self, tell: Tell) -> None:
        """Tell the other ranks of every step that is submitted from now on."""

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Pack what `follow` needs of a plan, on whichever rank."""

    def follow(self, step: StepInputs, specs: list[SampleSpec] | None = None) -> list[Sampled]:
        """Run this rank's part of a step that the first one has submitted, and choose its tokens where it is told how:
        at the last stage of a pipeline."""


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
        meter: StepMeter | None = None,
        images: ImageTable | None = None,
        states: Sequence[LayerState] = (),
    ) -> None:
        """`states`: of a model whose sequences have recurrent ones, of each of its linear layers."""
        self._states = states
        self.meter = meter or StepMeter()
        self._model = model
        self._tell: Tell | None = None
        self._adapters = adapters
        self._images = images
        self._merge_size = merge_size_of(model.config)
        self._ops = ops
        self._kv = kv
        self._mover = mover or BlockMover(ops, kv)

    def submit(self, plan: StepPlan) -> FinishedStep:
        step = self.prepare(plan)
        if self._tell is not None:
            self._tell(step)
        with self.meter.step():
            with in_step(self._tell):
                logits = self.forward(step)
            chosen = self.choose(logits, choices(plan.slices))
        return FinishedStep(outcome(plan.slices, chosen))

    def prepare(self, plan: StepPlan) -> StepInputs:
        """Pack what `forward` needs of a plan, here or on another rank."""
        return pack(plan, self._merge_size, recurrent=bool(self._states))

    def lead(self, tell: Tell) -> None:
        self._tell = tell

    def follow(self, step: StepInputs, specs: list[SampleSpec] | None = None) -> list[Sampled]:
        with self.meter.step():
            logits = self.forward(step)
            return self.choose(logits, specs) if specs is not None else []

    @torch.inference_mode()
    def forward(self, step: StepInputs) -> Tensor:
        """The logits of every row that a token is chosen from."""
        if step.copies:
            self._mover.move(step.copies)
        copy_states(self._states, step.state_copies)
        if step.placements and self._adapters is not None:
            self._adapters.place(step.placements)
        batch = host_batch(step, self._ops.device, taken(self._images, step), self._states)
        return self._model(batch, self._kv).float()

    @torch.inference_mode()
    def choose(self, logits: Tensor, specs: list[SampleSpec]) -> list[Sampled]:
        return sample(logits, specs)
