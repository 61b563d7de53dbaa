"""A mixture of experts in plain torch: the router's choice, and each expert once a step on its own rows.

The host asks whose they are, and waits to be told. Code that must not wait is in `triton.experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.core.model_config import Activation
from penstock.model.batch import Batch

if TYPE_CHECKING:
    from penstock.model.ops import Choose, ExpertWeights, Linear, Ops

ELSEWHERE = -1  # in place of an expert that another rank has


@dataclass(frozen=True)
class ExpertMap:
    """The experts of a layer as a rank looks them up, and how many tokens each was given. It is on the device: a
    captured graph reads and writes it, and it is changed in place."""

    counts: Tensor  # [experts, copies] int64: tokens that were given to each copy, on whichever rank; it only grows
    # [experts, 1 + copies] int32: how many copies there are, and of each its slot here, or that it is elsewhere. None:
    # this rank has all experts, or a part of each, in the order of their numbers.
    places: Tensor | None = None


def route(
    logits: Tensor,
    per_token: int,
    *,
    normalized: bool,
    experts: ExpertMap | None = None,
    batch: Batch | None = None,
    choose: Choose | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Ops.route`."""
    logits = logits.float()
    if choose is not None:
        ids, weights = choose(logits, per_token)
    elif normalized:
        best = logits.topk(per_token, dim=1)
        ids, weights = best.indices, best.values.softmax(dim=1)
    else:
        best = logits.softmax(dim=1).topk(per_token, dim=1)
        ids, weights = best.indices, best.values
    return (ids, weights) if experts is None else placed(ids, weights, experts, batch)


def placed(
    ids: Tensor, weights: Tensor, experts: ExpertMap, batch: Batch | None, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choices as this rank sees them: by its own slots. They are counted by expert and copy, in rows that are `counted`
    [tokens]; None: in all."""
    counts, places = experts.counts, experts.places
    cells = ids.long() * counts.shape[1]
    if places is not None:
        assert batch is not None
        turns = (batch.token_ids.long() + batch.positions)[:, None]
        copies = turns % places[ids, 0]
        cells += copies
        ids = places[ids, 1 + copies]
        weights = weights * (ids != ELSEWHERE)
    ones = torch.ones_like(cells) if counted is None else counted[:, None].expand_as(cells).to(cells.dtype)
    counts.view(-1).scatter_add_(0, cells.flatten(), ones.flatten())
    return ids, weights


def add_shared(found: Tensor, made: Tensor, logits: Tensor) -> Tensor:
    """See `Ops.add_shared`."""
    return found + made * sigmoid(logits).to(made.dtype)


def sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid of logits [rows, 1], in float32."""
    logits = logits.float()
    # A sigmoid as a softmax of two: torch's own may differ in the last bit with where in a tensor a number lies.
    return torch.cat((logits, torch.zeros_like(logits)), dim=1).softmax(dim=1)[:, :1]


@dataclass(frozen=True)
class HostExperts:
    """Expert by expert in the order of their numbers, so that a row's sum is taken in the same order in every batch."""

    ops: Ops
    linears: list[tuple[Linear, Linear]]  # gate_up and down of each
    activation: Activation = "silu"

    @classmethod
    def of(cls, ops: Ops, weights: Iterable[ExpertWeights], activation: Activation = "silu") -> HostExperts:
        return cls(ops, [_linears(ops, expert) for expert in weights], activation)

    def put(self, slot: int, expert: ExpertWeights) -> None:
        """See `ExpertLinears.put`."""
        self.linears[slot : slot + 1] = [_linears(self.ops, expert)]

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        per_token = ids.shape[1]
        for expert, places in _chosen(ids):
            gate_up, down = self.linears[expert]
            rows = places // per_token
            y = down(self.ops.gated(gate_up(x[rows]), self.activation))
            out.index_add_(0, rows, y * weights.flatten()[places, None].to(y.dtype))
        return out


def _linears(ops: Ops, expert: ExpertWeights) -> tuple[Linear, Linear]:
    return ops.linear(expert.gate_up, expert.gate_up_bias), ops.linear(expert.down, expert.down_bias)


def _chosen(ids: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Every expert here that somebody chose, and where in `ids`, counted through, it stands."""
    order, counts = ids.flatten().argsort(stable=True), (ids.flatten() + 1).bincount().tolist()
    for expert, places in enumerate(order.split_with_sizes(counts), ELSEWHERE):
        if len(places) and expert != ELSEWHERE:
            yield expert, places
