"""A mixture of experts in plain torch: who is chosen, and each expert once a step on its own rows.

The host asks whose they are, and waits to be told. Where it must not wait, see `triton.experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.model.quantized import Weight

if TYPE_CHECKING:
    from penstock.model.ops import Linear, Ops

ELSEWHERE = -1  # in place of an expert that another rank has
Pairs = Iterable[tuple[Weight, Weight]]  # gate_up and down of each


def route(logits: Tensor, per_token: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    logits = logits.float()
    if normalized:
        best = logits.topk(per_token, dim=1)
        return best.indices, best.values.softmax(dim=1)
    best = logits.softmax(dim=1).topk(per_token, dim=1)
    return best.indices, best.values


def add_shared(found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
    """See `Ops.add_shared`."""
    logits = logits.float()
    # A sigmoid as a softmax of two: torch's own may differ in the last bit with where in a tensor a number lies.
    share = torch.cat((logits, torch.zeros_like(logits)), dim=1).softmax(dim=1)[:, :1]
    return found + made * share.to(made.dtype)


@dataclass(frozen=True)
class HostExperts:
    """Expert by expert in the order of their numbers, so that a row's sum is taken in the same order in every batch."""

    ops: Ops
    linears: list[tuple[Linear, Linear]]

    @classmethod
    def of(cls, ops: Ops, pairs: Pairs) -> HostExperts:
        return cls(ops, [(ops.linear(gate_up), ops.linear(down)) for gate_up, down in pairs])

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        per_token = ids.shape[1]
        for expert, places in _chosen(ids):
            gate_up, down = self.linears[expert]
            rows = places // per_token
            y = down(self.ops.gated(gate_up(x[rows]), "silu"))
            out.index_add_(0, rows, y * weights.flatten()[places, None].to(y.dtype))
        return out


def _chosen(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every expert here that somebody chose, and where in `ids`, counted through, it stands."""
    order, counts = ids.flatten().argsort(stable=True), (ids.flatten() + 1).bincount().tolist()
    for expert, places in enumerate(order.split_with_sizes(counts), ELSEWHERE):
        if len(places) and expert != ELSEWHERE:
            yield expert, places
