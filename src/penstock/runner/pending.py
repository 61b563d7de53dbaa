"""A step that a GPU works on: its tokens are chosen there, and read when somebody asks. Made by `cuda_runner`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.core.request import TokenLogprobs
from penstock.runner.device_sampler import logprobs
from penstock.runner.verify import outcome
from penstock.sched.plan import Sampled, SampleSpec, StepPlan, StepResult

Scores = list[Tensor | None]  # per row that is chosen from, on the device: see device_sampler.logprobs


@dataclass
class PendingStep:
    """A step on the device. Asking for its result waits for it."""

    plan: StepPlan
    token_ids: Tensor  # pinned, one per row that is chosen from; valid once `done` has happened
    started: torch.cuda.Event
    done: torch.cuda.Event
    on_busy: Callable[[float], None]  # told how long the device worked on it
    launch_choice: Callable[[], Scores] | None  # None: it is launched
    scores: Scores = field(default_factory=list)

    @torch.inference_mode()
    def choose(self) -> None:
        if self.launch_choice is not None:
            self.scores, self.launch_choice = self.launch_choice(), None
            self.done.record()

    def result(self) -> StepResult:
        assert self.launch_choice is None
        self.done.synchronize()
        self.on_busy(self.started.elapsed_time(self.done) / 1e3)
        return outcome(self.plan.slices, sampled(self.token_ids, self.scores))


def sampled(token_ids: Tensor, scores: Scores) -> list[Sampled]:
    """Tokens that have been read, with the scores that somebody wants of them."""
    return list(map(_sampled, token_ids.tolist(), scores))


def score(logits: Tensor, chosen: Tensor, specs: list[SampleSpec]) -> Scores:
    wanted = (spec.params.num_logprobs for spec in specs)
    return [logprobs(logits[i], chosen[i], count) if count is not None else None for i, count in enumerate(wanted)]


def _sampled(token_id: int, scores: Tensor | None) -> Sampled:
    if scores is None:
        return Sampled([token_id])
    own, *top = scores.tolist()  # [(id, logprob)]
    return Sampled([token_id], [TokenLogprobs(own[1], [(int(other), value) for other, value in top])])


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
