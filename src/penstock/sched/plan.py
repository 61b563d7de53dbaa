"""Messages between scheduler and runner: one step's plan, and its result. Plain data.

The runner reads a plan while it submits it and keeps nothing: the lists in it belong to the scheduler. They are msgspec
structs because hundreds are made in every step, and nothing makes them faster; the garbage collector need not look at
them, since they hold no cycles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.core.images import ImageInput
from penstock.core.request import TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.sched.guiding import Mask


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """Choice of the token that follows a slice: sampling parameters, history and masks."""

    params: SamplingParams
    history: Sequence[int]  # every token known so far, prompt first; empty unless `params` look back
    prompt_len: int
    position: int  # of the token to choose; with the seed it keys the random number
    banned_ids: Sequence[int] = ()  # stop tokens that may not come yet
    mask: Mask | None = None  # of the tokens that may come


class Slice(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: tokens [start, start + num_tokens) of it, drafts at their end included."""

    request_id: str
    start: int
    num_tokens: int
    token_ids: Sequence[int]  # those the host knows: all, or all but the last
    block_ids: Sequence[int]
    sample: SampleSpec | None  # None: a prefill chunk that is not the last
    epoch: int  # how often the sequence had been preempted when this was planned
    ahead: Sequence[SampleSpec] = ()  # one per draft: how to choose the token after it, if it holds
    slot: int | None = None  # where its adapter lies; None: the base model
    images: Sequence[ImageInput] = ()  # of its whole prompt; embeddings of those in the slice are there, or encoded
    # Slot of its recurrent state, which its first token begins from zero; None: the model has none.
    state_slot: int | None = None

    @property
    def end(self) -> int:
        """End of the tokens that are the sequence's own, whatever becomes of the drafts."""
        return self.start + self.num_tokens - len(self.ahead)

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - len(self.ahead) :]

    @property
    def awaits_token(self) -> bool:
        """Its last token is the one that this sequence sampled in the step before, which is still in flight."""
        return len(self.token_ids) < self.num_tokens


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    slices: list[Slice]
    copies: list[tuple[int, int]] = []  # (source, destination) blocks, before all else, in order; host's come last
    placements: list[tuple[int, str]] = []  # (slot, adapter), likewise and in this order
    drops: list[str] = []  # images whose embeddings are forgotten, likewise
    encodes: list[ImageInput] = []  # images that are encoded after that, and kept
    state_copies: list[tuple[int, int]] = []  # (source, destination) slots of recurrent states, before all, in order

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)


class Sampled(msgspec.Struct, frozen=True, gc=False):
    token_ids: list[int]  # zero to k tokens: with drafts, those that held and the one after them
    logprobs: list[TokenLogprobs] | None = None


class StepResult(msgspec.Struct, frozen=True, gc=False):
    sampled: list[Sampled | None]  # one per slice of the plan; None where nothing was to be sampled


class StepHandle(Protocol):
    def choose(self) -> None:
        """Choose the step's tokens, if that was put off: masks may depend on the step before, which is read by now.
        Comes before the next step is submitted."""

    def result(self) -> StepResult:
        """Wait for the step and return its tokens."""


class Runner(Protocol):
    overlaps: bool  # True: submit returns while the device works, and steps queue up behind each other in order

    def submit(self, plan: StepPlan) -> StepHandle: ...
