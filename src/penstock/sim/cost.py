"""The cost of a step, as a few numbers of one replica: a roofline, in the words of a profile's file.

    step = step_s                                    whatever is in it: launches, the host
         + max(weights_s, tokens x token_s           weights are read once; more tokens are bound by the products
                          + decodes x head_s)
         + decodes x sequence_s                      what the host does for each: sample, hand out
         + tokens x exchange_s                       between ranks
         + prompts' pairs of tokens x pair_s         attention, computed
         + decodes' tokens of context x context_s    attention, read from the KV cache

The sum is `capacity.step_times`. The numbers are fitted to an engine's steps (`calibrate`) or to what was measured of
one, or reckoned from a model's shape and a GPU's datasheet (`predicted`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from msgspec import Meta

from penstock.capacity.step_times import StepTimes
from penstock.engine.step_log import StepShape

Seconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class StepCost:
    step_s: Seconds
    weights_s: Seconds
    token_s: Seconds
    pair_s: Seconds = 0.0
    context_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    head_s: Seconds = 0.0  # products of a decode's logits
    exchange_s: Seconds = 0.0
    experts_s: Seconds = 0.0  # of a mixture's weights_s, its routed experts
    expert_share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of them, those that one token is given

    @cached_property
    def times(self) -> StepTimes:
        return StepTimes(
            fixed_s=self.step_s,
            read_s=self.weights_s,
            linear_token_s=self.token_s,
            head_token_s=self.head_s,
            token_s=self.exchange_s,
            pair_s=self.pair_s,
            kv_token_s=self.context_s,
            sequence_s=self.sequence_s,
            experts_s=self.experts_s,
            expert_share=self.expert_share,
        )

    @classmethod
    def of_times(cls, times: StepTimes) -> StepCost:
        return cls(
            step_s=times.fixed_s,
            weights_s=times.read_s,
            token_s=times.linear_token_s,
            pair_s=times.pair_s,
            context_s=times.kv_token_s,
            sequence_s=times.sequence_s,
            head_s=times.head_token_s,
            exchange_s=times.token_s,
            experts_s=times.experts_s,
            expert_share=times.expert_share,
        )

    def seconds(self, shape: StepShape) -> float:
        tokens = shape.prefill_tokens + shape.drafts
        return self.times.seconds(tokens, shape.prefill_pairs, shape.decodes, shape.decode_context)

    def decode_seconds(self, decodes: int, context: int, steps: int) -> list[float]:
        """The seconds of each of so many steps in which everybody decodes; each context grows by a token in each."""
        fixed_s, context_s = self.times.seconds(0, 0, decodes, 0), self.context_s
        return [fixed_s + read * context_s for read in range(context, context + steps * decodes, decodes)]

    def work_s(self, shape: StepShape) -> float:
        """The seconds that a step's content takes of a device that is never idle: without what every step costs."""
        tokens = shape.prefill_tokens + shape.decodes + shape.drafts
        return (
            tokens * (self.token_s + self.exchange_s)
            + shape.prefill_pairs * self.pair_s
            + shape.decode_context * self.context_s
            + shape.decodes * (self.sequence_s + self.head_s)
        )

    def request_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The work of a whole request of which nothing is in the cache."""
        pairs = prompt_tokens * (prompt_tokens + 1) // 2
        context = output_tokens * prompt_tokens + output_tokens * (output_tokens + 1) // 2
        return self.work_s(StepShape(prompt_tokens, pairs, output_tokens, context))

    def prefill_tokens_per_s(self, prompt_tokens: int, step_tokens: int) -> float:
        """The speed at which prompts of this length are computed in steps full of them."""
        pairs = step_tokens * (prompt_tokens + 1) // 2
        return step_tokens / self.seconds(StepShape(step_tokens, pairs))
