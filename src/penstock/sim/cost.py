"""How long a step takes, as six numbers of one replica: a roofline.

    step = step_s                                    whatever is in it: launches, the host
         + max(weights_s, tokens x token_s)          weights are read once; more tokens are bound by the products
         + prompts' pairs of tokens x pair_s         attention, computed
         + decodes' tokens of context x context_s    attention, read from the KV cache
         + decodes x sequence_s                      what the host does for each: sample, hand out

The same form as `capacity.step_cost`, which reckons its numbers from a model's shape and a GPU's datasheet; these are
fitted to an engine's steps (`calibrate`), or to what was measured of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

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

    def seconds(self, shape: StepShape) -> float:
        prompts_s = shape.prefill_pairs * self.pair_s
        return (
            self._fixed_s(shape.prefill_tokens + shape.decodes + shape.drafts, shape.decodes)
            + prompts_s
            + (shape.decode_context * self.context_s)
        )

    def decode_seconds(self, decodes: int, context: int, steps: int) -> list[float]:
        """Of each of so many steps in which everybody decodes; the context grows by a token of each in each."""
        fixed_s, context_s = self._fixed_s(decodes, decodes) + 0.0, self.context_s
        return [fixed_s + read * context_s for read in range(context, context + steps * decodes, decodes)]

    def work_s(self, shape: StepShape) -> float:
        """What the step's content takes of a device that is never idle: without what every step costs anyway."""
        tokens = shape.prefill_tokens + shape.decodes + shape.drafts
        return (
            tokens * self.token_s
            + shape.prefill_pairs * self.pair_s
            + shape.decode_context * self.context_s
            + shape.decodes * self.sequence_s
        )

    def request_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """The work of a whole request of which nothing is in the cache."""
        pairs = prompt_tokens * (prompt_tokens + 1) // 2
        context = output_tokens * prompt_tokens + output_tokens * (output_tokens + 1) // 2
        return self.work_s(StepShape(prompt_tokens, pairs, output_tokens, context))

    def prefill_tokens_per_s(self, prompt_tokens: int, step_tokens: int) -> float:
        """Of prompts of this length in steps full of them."""
        pairs = step_tokens * (prompt_tokens + 1) // 2
        return step_tokens / self.seconds(StepShape(step_tokens, pairs))

    def _fixed_s(self, tokens: int, decodes: int) -> float:
        products_s = tokens * self.token_s
        bound_s = products_s if products_s > self.weights_s else self.weights_s
        return self.step_s + bound_s + decodes * self.sequence_s
