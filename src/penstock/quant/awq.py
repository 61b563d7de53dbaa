"""AWQ (Lin et al., 2023): channels that carry large activations are scaled up before the weight is rounded, and down
again where they come from, so that their rounding costs less; then the ends of each group are cut off where that helps.

A search finds how far. Knows tensors, no models: the caller divides what feeds the layer by the scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.model.quantized.grouped import GroupedWeight
from penstock.quant.grid import Grid
from penstock.quant.inputs import Inputs, mean_magnitudes

TRIES = 20  # powers of the activations' magnitude, from 0 (no scaling) to 1
LARGEST = 1e4  # a scale beyond it would push the weights of others out of float16


def quantized(weight: Tensor, inputs: Inputs, grid: Grid, group: int, by_column: Tensor) -> GroupedWeight:
    """A [out, in] weight in float32 with its columns multiplied by these scales [in], cut off where that helps."""
    moments = inputs.products / torch.outer(by_column, by_column)
    scaled = weight * by_column
    count = weight.shape[1] // group
    blocks = _blocks(moments, count)
    groups = scaled.view(weight.shape[0], count, group)
    return grid.nearest(scaled, grid.best(groups, lambda error: _cost_in_blocks(error, blocks)))


def best_scales(linears: Sequence[tuple[Tensor, Inputs]], grid: Grid, group: int, sources: Tensor) -> Tensor:
    """[channels]: of all powers, the one whose rounding does least to the outputs of all linears that these feed.

    `sources` [in] tells which channel becomes each column: columns with the same source share a scale.
    """
    magnitudes = _mean_by_source(mean_magnitudes([inputs for _, inputs in linears]), sources).clamp(min=1e-6)
    best, least = torch.ones_like(magnitudes), float("inf")
    for i in range(TRIES):
        scales = magnitudes ** (i / TRIES)
        scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1 / LARGEST, LARGEST)
        cost = sum(_cost(weight, inputs, grid, group, scales[sources]) for weight, inputs in linears)
        if cost < least:
            best, least = scales, cost
    return best


def _cost(weight: Tensor, inputs: Inputs, grid: Grid, group: int, by_column: Tensor) -> float:
    """Cost of rounding the weight so scaled: how far its outputs move, over all rows."""
    groups = (weight * by_column).view(weight.shape[0], -1, group)
    error = grid.error(groups, grid.widest(groups)).flatten(1) / by_column
    return float(((error @ inputs.products) * error).sum()) * inputs.num_rows


def _blocks(moments: Tensor, count: int) -> Tensor:
    """[groups, in group, in group]: those of each group with itself."""
    size = moments.shape[0] // count
    return torch.stack([moments[i : i + size, i : i + size] for i in range(0, moments.shape[0], size)])


def _cost_in_blocks(error: Tensor, blocks: Tensor) -> Tensor:
    """[out, groups, in group] -> [out, groups]"""
    by_group = error.transpose(0, 1)  # [groups, out, in group]
    return (torch.bmm(by_group, blocks) * by_group).sum(dim=-1).T


def _mean_by_source(values: Tensor, sources: Tensor) -> Tensor:
    count = int(sources.max()) + 1
    sums = torch.zeros(count, device=values.device).index_add_(0, sources, values)
    return sums / torch.bincount(sources, minlength=count)
