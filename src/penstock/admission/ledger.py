"""One entry per admitted request: what it holds where, for whom. Settled once, whatever the end."""

from __future__ import annotations

import msgspec

from penstock.router.request import EdgeRequest

OUTPUT_WEIGHT = 2  # a token of output keeps the device about as long as two of a prompt


def cost(prompt_tokens: int, output_tokens: int) -> int:
    """Returns the cost that fairness and forecasts count in."""
    return prompt_tokens + OUTPUT_WEIGHT * output_tokens


def expected_cost(request: EdgeRequest) -> int:
    """Returns what a request will probably cost; its end settles the difference."""
    return request.prompt_tokens + OUTPUT_WEIGHT * request.output_tokens


class Entry(msgspec.Struct, gc=False):
    request: EdgeRequest
    replica_id: str
    admitted_at: float
    predicted_ttft_s: float
    sent_at: float  # to its present replica
    sent_tokens: int  # what that replica had to prefill: after a move, more than the prompt
    started_at: float | None = None  # its first token
    source_id: str = ""  # of the replica that computes its prompt for the present one; empty: none does
    source_tokens: int = 0  # what that has to prefill
