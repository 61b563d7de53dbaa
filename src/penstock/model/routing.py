"""DeepSeek's routers: experts have scores, groups of neighbours are chosen by the scores of their best, and a token's
experts are the best of these groups. A bias that was learned to even out the load takes part in the choice alone.

Plain torch, on whatever device the scores are; nothing is read back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.model_config import Routing

_TINY = 1e-20  # added to the sum that weights are divided by


@dataclass(frozen=True)
class GroupedChoice:
    """See `ops.Choose`."""

    routing: Routing
    normalized: bool  # the weights of a token's experts sum to one, before they are scaled
    bias: Tensor | None = None  # [experts] float32

    def __call__(self, logits: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        scores = _scores(logits.float(), self.routing)
        ids = self._eligible(scores if self.bias is None else scores + self.bias).topk(per_token, dim=1).indices
        weights = scores.gather(1, ids)
        if self.normalized:
            weights = weights / (weights.sum(dim=1, keepdim=True) + _TINY)
        return ids, weights * self.routing.scale

    def _eligible(self, scores: Tensor) -> Tensor:
        """-inf in place of the experts of all other groups."""
        routing = self.routing
        if routing.groups_per_token == routing.num_groups:
            return scores
        groups = scores.view(len(scores), routing.num_groups, -1)  # [tokens, groups, experts of each]
        best = groups.topk(2 if routing.group_score == "best two" else 1, dim=2).values.sum(dim=2)
        chosen = best.topk(routing.groups_per_token, dim=1).indices
        is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        return groups.masked_fill(~is_chosen[:, :, None], -torch.inf).flatten(1)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.scores == "softmax":
        return logits.softmax(dim=1)
    # A sigmoid as a softmax of two: torch's own may differ in the last bit with where in a tensor a number lies.
    return torch.stack((logits, torch.zeros_like(logits)), dim=2).softmax(dim=2)[..., 0]
