from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.quant.grid import Grid

GRIDS = st.builds(Grid, st.sampled_from([4, 8]), st.booleans())


@st.composite
def groups(draw: st.DrawFn) -> Tensor:
    """[out, groups, in group], some with an outlier, some all of one sign, some zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    found = torch.randn(4, 3, 16, generator=generator) * draw(st.sampled_from([1e-2, 0.2, 3.0]))
    found[0, 0, 3] *= draw(st.sampled_from([1.0, 40.0]))
    found[1] = found[1].abs()
    found[2] = -found[2].abs()
    found[3, 0] = 0.0
    return found


@settings(max_examples=40)
@given(groups(), GRIDS)
def test_the_widest_steps_reach_every_number_but_for_the_roundings_of_their_ends(weights: Tensor, grid: Grid) -> None:
    steps = grid.widest(weights)
    error = grid.error(weights, steps).abs()
    # Half a step; at the ends as much again, where the zero point is rounded or one side is a step short, and float16.
    assert (error <= steps.scales.abs()[..., None] * 1.2).all()


@settings(max_examples=40)
@given(groups(), GRIDS)
def test_zero_stays_zero_and_no_zero_point_is_the_lowest_value(weights: Tensor, grid: Grid) -> None:
    steps = grid.widest(weights)
    assert (steps.meant(steps.rounded(torch.zeros_like(weights), grid.bits)) == 0).all()
    assert (steps.zeros >= 1).all()
    assert (steps.zeros < 1 << grid.bits).all()


@settings(max_examples=40)
@given(groups(), GRIDS)
def test_the_best_steps_never_cost_more_than_the_widest(weights: Tensor, grid: Grid) -> None:
    def cost(error: Tensor) -> Tensor:
        return error.square().sum(dim=-1)

    best = cost(grid.error(weights, grid.best(weights, cost)))
    assert (best <= cost(grid.error(weights, grid.widest(weights)))).all()


@settings(max_examples=40)
@given(groups(), GRIDS)
def test_what_is_kept_stands_for_what_was_rounded(weights: Tensor, grid: Grid) -> None:
    steps = grid.widest(weights)
    kept = grid.nearest(weights.flatten(1), steps)
    assert torch.equal(kept.dequantized(), steps.meant(steps.rounded(weights, grid.bits)).flatten(1))


def test_a_group_gives_up_its_outlier_only_if_that_costs_little() -> None:
    grid = Grid(4, symmetric=True)
    weights = torch.linspace(-1, 1, 32).view(1, 1, 32)
    weights[..., 0] = -4.0

    def largest(importance: float) -> float:
        by_column = torch.ones(32)
        by_column[0] = importance
        return float(grid.best(weights, lambda error: (error.square() * by_column).sum(dim=-1)).scales.abs())

    assert largest(1e-3) < largest(1e3)
