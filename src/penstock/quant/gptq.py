"""GPTQ (Frantar et al., 2022): a weight is rounded column by column, and what a column's rounding does to the layer's
output is made up for, as far as it can be, by the columns that are not rounded yet.

The inverse of the inputs' second moments tells which columns can stand in for which. Knows tensors, no models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.model.quantized.grouped import GroupedWeight
from penstock.quant.grid import Grid, Steps
from penstock.quant.inputs import Inputs

DAMPING = 0.01  # of the mean of the moments' diagonal, added to it: the inverse must exist and stay calm
BLOCK = 128  # columns after which the rest of the weight learns of the errors


def quantized(weight: Tensor, inputs: Inputs, grid: Grid, group: int, *, act_order: bool) -> GroupedWeight:
    """A [out, in] weight in float32.

    Columns with the largest inputs go first: what comes later makes up for them. They are grouped so too with
    `act_order`, which fits the scales better and costs a gather when it is served; else groups stay as they lie.
    """
    moments = inputs.products
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    back = torch.argsort(order)
    factor = inverse_factor(moments[order][:, order])
    importance = 1.0 / factor.diagonal().square()  # what an error costs once the later columns have made up for it
    ordered = weight[:, order]
    if act_order:
        steps = _fitted(ordered, importance, grid, group)
        group_of = torch.arange(weight.shape[1], device=weight.device) // group
        return grid.kept(_rounded(ordered, factor, steps, group_of, grid), steps, order)
    steps = _fitted(weight, importance[back], grid, group)
    return grid.kept(_rounded(ordered, factor, steps, order // group, grid)[:, back], steps)


def inverse_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse. A column that is always zero tells nothing: it stands alone."""
    moments = moments.clone()
    diagonal = moments.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    diagonal[diagonal == 0] = mean
    for damping in (DAMPING, 10 * DAMPING, 100 * DAMPING):
        damped = moments + torch.diag_embed(torch.full_like(diagonal, float(damping * mean)))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
    raise ModelCorrupt("its activations are not numbers on this text: the weights are damaged")


def _fitted(weight: Tensor, importance: Tensor, grid: Grid, group: int) -> Steps:
    groups = weight.view(weight.shape[0], -1, group)
    by_group = importance.view(-1, group)
    return grid.best(groups, lambda error: (error.square_() * by_group).sum(dim=-1))


def _rounded(weight: Tensor, factor: Tensor, steps: Steps, group_of: Tensor, grid: Grid) -> Tensor:
    """[out, in] integers in float32. Errors are handed on inside a block at once, to the others block by block."""
    weight = weight.clone()
    columns = weight.shape[1]
    integers = torch.empty_like(weight)
    scales, zeros = steps.scales[:, group_of].T.contiguous(), steps.zeros[:, group_of].T.contiguous()  # [in, out]
    most = (1 << grid.bits) - 1
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        block = weight[:, start:end].T.contiguous()  # [in block, out]
        errors = torch.empty_like(block)
        for i in range(end - start):
            column = start + i
            values = (block[i] / scales[column]).round_().add_(zeros[column]).clamp_(0, most)
            integers[:, column] = values
            errors[i] = (block[i] - (values - zeros[column]) * scales[column]) / factor[column, column]
            block[i + 1 :].addr_(factor[column, column + 1 : end], errors[i], alpha=-1.0)
        weight[:, end:].addmm_(errors.T, factor[start:end, end:], alpha=-1.0)
    return integers
