"""What the scheduler and the runner say to each other: one step's plan, and what came of it. Plain data.

The runner reads a plan while it submits it and keeps nothing: the lists in it belong to the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to choose the token that follows a slice."""

    params: SamplingParams
    history: Sequence[int]  # every token known so far, prompt first
    prompt_len: int
    position: int  # of the token to choose; with the seed it keys the random number
    banned_ids: Sequence[int] = ()  # stop tokens that may not come yet


@dataclass(frozen=True, slots=True)
class Slice:
    """One sequence's part of a step: tokens [start, start + len(token_ids)) of it."""

    request_id: str
    start: int
    token_ids: Sequence[int]  # None of them in flight: see `awaits_token`
    awaits_token: bool  # one more token follows token_ids: the one this sequence sampled in the step before
    block_ids: Sequence[int]
    sample: SampleSpec | None  # None: a prefill chunk that is not the last
    epoch: int  # how often the sequence had been preempted when this was planned

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.awaits_token


@dataclass(frozen=True, slots=True)
class StepPlan:
    slices: list[Slice]
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) blocks, before all else

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: list[int]  # zero to k tokens
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    sampled: list[Sampled | None]  # one per slice of the plan; None where nothing was to be sampled


class StepHandle(Protocol):
    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""


class Runner(Protocol):
    overlaps: bool  # True: submit returns while the device works, and steps queue up behind each other in order

    def submit(self, plan: StepPlan) -> StepHandle: ...
