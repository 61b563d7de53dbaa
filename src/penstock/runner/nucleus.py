"""Nucleus: the tokens that top-k, top-p and min-p leave, in this order, and how likely each is."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.sampling import SamplingParams

_GUESSES = (256, 4096)  # how many of the best tokens to sort before sorting all of them, which is slow


def truncates(params: SamplingParams) -> bool:
    return params.top_k is not None or params.top_p < 1.0 or params.min_p > 0.0


def nucleus(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Ids and probabilities, best first; these need not sum to one. A short sort will do without a top-k, unless the
    nucleus turns out larger."""
    total = row.logsumexp(dim=-1)
    counts = (*_GUESSES, row.shape[0]) if params.top_k is None else (params.top_k,)
    for count in counts:
        values, ids = row.topk(min(count, row.shape[0]))
        # Top-p is a share of what top-k left.
        probabilities = (values - total).exp() if params.top_k is None else values.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        keep = before < params.top_p
        keep &= probabilities >= params.min_p * probabilities[0]
        if not bool(keep[-1]):
            break
    kept = int(keep.sum())  # both conditions hold for a prefix of the sorted tokens
    return ids[:kept], probabilities[:kept]
