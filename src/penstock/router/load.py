"""The load of a replica, in the one unit that adds up over unequal replicas: seconds until a first token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from penstock.core.replica import ReplicaSnapshot
from penstock.core.slo import Slo
from penstock.router.request import EdgeRequest

Weight = Annotated[float, Meta(ge=0)]

_DEFAULT_RATIO = 5.0  # of ttft_s to tpot_s in the default objectives, which the default weights are for


def expected_ttft_s(request: EdgeRequest, replica: ReplicaSnapshot, saved_tokens: int = 0) -> float:
    """Prefill and decode are counted apart: queued prompts by the prefill speed, running sequences as a step's time."""
    return replica.queue_s + (request.prompt_tokens - saved_tokens) / replica.prefill_tokens_per_s


def saved_tokens(request: EdgeRequest, replica: ReplicaSnapshot, blocks: int, on_host: int) -> int:
    """Returns what it is worth that a replica holds so many of a prompt's blocks, so many of them in host memory only:
    in tokens that it need not compute."""
    held = request.tokens_of(blocks)
    return held - int(replica.host_share * min(held, on_host * request.block_tokens)) if on_host else held


@dataclass(frozen=True)
class Load:
    """Weights of what counts as load. A second that a first token has to wait is a second; the rest is set against
    that."""

    queue: Weight = 1.0  # of a second of waiting behind others
    kv_pressure: Weight = 0.15  # seconds for a KV cache that is half full; a barrier that grows without bound
    output: Weight = 0.02  # of a second of decoding, where the output's length is expected

    def by_objectives(self, slo: Slo) -> Load:
        """The same load where a second of decoding counts as the objectives have it: as large a part of an answer's
        time at `tpot_s` a token as a second of waiting is of `ttft_s`."""
        if slo.tpot_s is None:
            return self
        return replace(self, output=self.output * slo.ttft_s / slo.tpot_s / _DEFAULT_RATIO)
