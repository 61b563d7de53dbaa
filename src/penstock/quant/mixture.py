"""A layer's experts made small: each is fitted to the rows that the router hands it. The router itself stays.

One norm feeds all experts, so they are scaled together, and all else that reads that norm makes up for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.model.ops import Stream
from penstock.model.sparse import SparseMLP
from penstock.quant.inputs import Inputs
from penstock.quant.layerwise import Given, Method, divide_norm, divide_rows, inputs_of
from penstock.quant.opened import Expert, KeptLinear, OpenLayer, kept
from penstock.quant.walk import Walk

# Rows for each of a weight's columns. An expert that is handed fewer is rounded: there is hardly anything to gain, and
# those few may be of one text alone.
LEAST = 1 / 32


@dataclass(frozen=True)
class Taker:
    """An expert, and which rows it is given."""

    expert: Expert
    rows: list[Tensor]  # of each part of the walk
    name: str | None  # None: it is given all

    def taken(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        return (part[rows] for part, rows in zip(parts, self.rows, strict=True))

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)


def fit_experts(layer: OpenLayer, walk: Walk, method: Method) -> list[str]:
    """The second half of a layer that has experts. Names those of them that were given too few rows to be fitted."""
    mlp = layer.mlp
    assert isinstance(mlp, SparseMLP)
    parts = list(walk.normed(walk.hidden, mlp.norm))
    takers = _takers(layer, mlp, parts)
    givens = [_given(taker, taker.expert.gate_up, taker.taken(parts)) for taker in takers]
    found = method(givens, torch.arange(walk.config.hidden_size, device=walk.ops.device))
    for taker, weight in zip(takers, found.weights, strict=True):
        taker.expert.gate_up.become(weight)
    if found.divisors is not None:
        divide_norm(mlp.norm, found.divisors, walk)
        for router in layer.routers.values():
            router.become((router.wide * found.divisors).to(walk.dtype).float())
        parts = list(walk.normed(walk.hidden, mlp.norm))
    for taker in takers:
        _fit_down(taker, parts, walk, method)
    for hidden in walk.hidden:
        mlp(Stream(hidden))  # adds to it
    return [
        taker.name
        for taker, given in zip(takers, givens, strict=True)
        if given.inputs is None and taker.name is not None
    ]


def _takers(layer: OpenLayer, mlp: SparseMLP, parts: Sequence[Tensor]) -> list[Taker]:
    chosen = [mlp.ops.route(mlp.router(part), mlp.per_token, normalized=mlp.normalized)[0] for part in parts]

    def rows_of(number: int) -> list[Tensor]:
        return [(ids == number).any(dim=1).nonzero().flatten() for ids in chosen]

    takers = [Taker(each, rows_of(n), layer.expert_name(n)) for n, each in enumerate(layer.experts)]
    if mlp.shared is not None:
        everything = [torch.arange(len(part), device=part.device) for part in parts]
        takers.append(Taker(Expert(kept(mlp.shared.gate_up), kept(mlp.shared.down)), everything, None))
    return takers


def _given(taker: Taker, linear: KeptLinear, given: Iterator[Tensor]) -> Given:
    is_enough = taker.name is None or taker.num_rows >= LEAST * linear.wide.shape[1]
    inputs: Inputs | None = inputs_of(linear, given) if is_enough else None
    return Given(linear.wide, inputs)


def _fit_down(taker: Taker, parts: Sequence[Tensor], walk: Walk, method: Method) -> None:
    gate_up, down = taker.expert.gate_up, taker.expert.down
    gated = (walk.ops.gated(gate_up(rows), "silu") for rows in taker.taken(parts))
    given = _given(taker, down, gated)
    found = method([given], torch.arange(down.wide.shape[1], device=down.wide.device))
    down.become(found.weights[0])
    if found.divisors is not None:
        divide_rows(gate_up, found.divisors, walk.dtype)  # up is its end
