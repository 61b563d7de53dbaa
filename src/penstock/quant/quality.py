"""Quality lost by quantizing: a model's surprise at a text, and how far its predictions moved from the original's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.hub.checkpoint import Checkpoint
from penstock.quant.opened import OpenLayer
from penstock.quant.walk import Walk

Progress = Callable[[int, int], None]  # (layers done, layers in all)


@dataclass(frozen=True)
class Quality:
    perplexity: float
    divergence: float  # of the next token's distribution from the original's (Kullback-Leibler), in nats a token


@torch.no_grad()
def walked(
    checkpoint: Checkpoint,
    token_ids: Tensor,
    device: torch.device,
    progress: Progress,
    change: Callable[[OpenLayer], None] = lambda layer: None,
) -> Walk:
    """All layers, each of them changed."""
    walk = Walk(checkpoint, token_ids, device)
    for index in range(walk.config.num_layers):
        layer = walk.layer(index)
        change(layer)
        walk.advance(layer)
        progress(index + 1, walk.config.num_layers)
    return walk


@torch.no_grad()
def judged(walk: Walk, original: Walk | None = None) -> Quality:
    """Quality against another walk over the same text; without one, it is the original's."""
    surprise = divergence = 0.0
    count = 0
    others = repeat(None) if original is None else original.outputs()
    for (logits, ids), other in zip(walk.outputs(), others, strict=False):
        found = logits[:-1].log_softmax(dim=-1)
        surprise += float(F.nll_loss(found, ids[1:], reduction="sum"))
        if other is not None:
            meant = other[0][:-1].log_softmax(dim=-1)
            divergence += float(F.kl_div(found, meant, reduction="sum", log_target=True))
        count += ids.shape[0] - 1
    return Quality(math.exp(surprise / count), divergence / count)
