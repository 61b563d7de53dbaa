"""The time of a step, as the seconds of its parts: the one formula that plans, simulations and benches share.

    step = fixed                                 whatever is in it
         + max(weights read, products computed)  linear layers are bound by the one or the other; of a mixture the
                                                 experts that the step's tokens are expected to be given
         + decodes x sequence
         + tokens x token                        between ranks
         + attention of prompts, computed        by pairs of tokens
         + context of decodes, read              from the KV cache

It knows neither a model nor a device: `step_cost` reckons the parts from those, `sim.calibrate` fits them to steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.capacity.model_bytes import share_read


@dataclass(slots=True)
class StepTimes:
    """Parts are made once, so that a step costs a few multiplications."""

    fixed_s: float
    read_s: float  # all weights; of a mixture, all experts among them
    linear_token_s: float
    head_token_s: float = 0.0  # for each decode, besides
    token_s: float = 0.0  # of communication
    pair_s: float = 0.0
    kv_token_s: float = 0.0
    sequence_s: float = 0.0  # for each decode
    experts_s: float = 0.0  # of `read_s`, the routed experts' part
    expert_share: float = 1.0  # of them, those that one token is given

    def seconds(self, prefill_tokens: float, prefill_pairs: float, num_decodes: float, decode_context: float) -> float:
        """`prefill_pairs`: tokens of context that the prompts' tokens look at, all together (`model_bytes.pairs`).

        `decode_context`: tokens of context that the decodes read, all together.
        """
        tokens = prefill_tokens + num_decodes
        products_s = tokens * self.linear_token_s + num_decodes * self.head_token_s
        read_s = self.read_s
        if self.experts_s:
            read_s -= self.experts_s * (1.0 - share_read(self.expert_share, tokens))
        fixed_s = self.fixed_s + (products_s if products_s > read_s else read_s)
        fixed_s += num_decodes * self.sequence_s + tokens * self.token_s
        return fixed_s + prefill_pairs * self.pair_s + decode_context * self.kv_token_s
