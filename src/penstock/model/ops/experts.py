"""The experts of a mixture, by what the host knows: who was chosen, or only how many rows there are.

On a CPU each expert runs once a step, on its own rows. A GPU's host must not wait to be told whose they are: there all
experts are one product over rows in their order, or each runs on every row and what nobody asked for is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.model.quantized import Weight

if TYPE_CHECKING:
    from penstock.model.ops import ExpertLinears, Linear, Ops

MULTIPLE = 8  # of elements: a grouped product takes rows that begin at 16 bytes
Pairs = Iterable[tuple[Weight, Weight]]  # gate_up and down of each


@dataclass(frozen=True)
class HostExperts:
    """Expert by expert in the order of their numbers, so that a row's sum is taken in the same order in every batch."""

    ops: Ops
    linears: list[tuple[Linear, Linear]]

    @classmethod
    def of(cls, ops: Ops, pairs: Pairs) -> HostExperts:
        return cls(ops, _packed(ops, pairs))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        per_token = ids.shape[1]
        for expert, places in _chosen(ids):
            gate_up, down = self.linears[expert]
            rows = places // per_token
            y = down(self.ops.gated(gate_up(x[rows]), "silu"))
            out.index_add_(0, rows, y * weights.flatten()[places, None].to(y.dtype))
        return out


@dataclass(frozen=True)
class MaskedExperts:
    """Every expert on every row: for weights in formats that no grouped product takes. Right, and slow."""

    ops: Ops
    linears: list[tuple[Linear, Linear]]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(self.linears):
            share = torch.where(ids == expert, weights, 0.0).sum(dim=1, keepdim=True).to(x.dtype)
            # Not times zero: what an expert makes of a row that is not its own may be infinite.
            out += torch.where(share > 0, down(self.ops.gated(gate_up(x), "silu")) * share, 0.0)
        return out


@dataclass(frozen=True)
class StackedExperts:
    """All experts in one product each way, over rows that lie expert by expert."""

    ops: Ops
    gate_up: Tensor  # [experts, 2 * ffn, hidden]
    down: Tensor  # [experts, hidden, ffn]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        (tokens, per_token), count = ids.shape, self.gate_up.shape[0]
        order = ids.flatten().argsort(stable=True)
        chosen = ids.flatten()[:, None] == torch.arange(count, device=ids.device)
        ends = chosen.sum(dim=0).cumsum(dim=0).to(torch.int32)
        halves = F.grouped_mm(x[order // per_token], self.gate_up.transpose(1, 2), offs=ends)
        found = F.grouped_mm(self.ops.gated(halves, "silu"), self.down.transpose(1, 2), offs=ends)
        by_token = torch.empty_like(found).index_copy_(0, order, found).view(tokens, per_token, -1)
        return (by_token * weights[:, :, None].to(x.dtype)).sum(dim=1)


def device_experts(ops: Ops, count: int, pairs: Pairs, *, can_group: bool) -> ExpertLinears:
    """For a device whose host must not wait. `can_group`: it has a product of groups for the activations' type."""
    rest = iter(pairs)
    first = next(rest)
    pairs = chain([first], rest)
    aligned = all(size % MULTIPLE == 0 for weight in first for size in weight.shape)
    if not can_group or not aligned or not all(isinstance(weight, Tensor) for weight in first):
        return MaskedExperts(ops, _packed(ops, pairs))
    sizes = [(count, *weight.shape) for weight in first]
    gate_ups, downs = (torch.empty(size, dtype=ops.weight_dtype, device=ops.device) for size in sizes)
    for expert, (gate_up, down) in enumerate(pairs):
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        gate_ups[expert], downs[expert] = gate_up, down
    return StackedExperts(ops, gate_ups, downs)


def _packed(ops: Ops, pairs: Pairs) -> list[tuple[Linear, Linear]]:
    return [(ops.linear(gate_up), ops.linear(down)) for gate_up, down in pairs]


def _chosen(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every expert that somebody chose, and where in `ids`, counted through, it stands."""
    order, counts = ids.flatten().argsort(stable=True), ids.flatten().bincount().tolist()
    for expert, places in enumerate(order.split_with_sizes(counts)):
        if len(places):
            yield expert, places
