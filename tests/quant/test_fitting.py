"""GPTQ and AWQ on a single weight: what they do to the layer's output, against rounding to the nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.core.errors import ModelCorrupt
from penstock.model.quantized.grouped import GroupedWeight
from penstock.quant import awq, gptq
from penstock.quant.grid import Grid
from penstock.quant.inputs import Inputs

OUT, COLUMNS, GROUP = 48, 128, 32


def activations(*, seed: int = 0) -> Tensor:
    """Correlated, as a model's are, and a few channels much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(24, COLUMNS, generator=generator)
    rows = torch.randn(2000, 24, generator=generator) @ mixing + 0.5 * torch.randn(2000, COLUMNS, generator=generator)
    rows[:, [5, 40, 99]] *= 12.0
    return rows


def inputs(rows: Tensor) -> Inputs:
    found = Inputs(rows.shape[1], rows.device)
    for part in rows.split(300):
        found.add(part)
    return found


def weight() -> Tensor:
    return torch.randn(OUT, COLUMNS, generator=torch.Generator().manual_seed(1)) * 0.03


def nearest(grid: Grid) -> GroupedWeight:
    return grid.nearest(weight(), grid.widest(weight().view(OUT, -1, GROUP)))


def loss(found: Tensor, rows: Tensor) -> float:
    return float((rows @ (found - weight()).T).square().mean())


def test_inputs_are_the_same_however_they_are_cut() -> None:
    rows = activations()
    found = inputs(rows)
    torch.testing.assert_close(found.products, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.magnitudes, rows.abs().mean(dim=0))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_does_far_less_to_the_output_than_rounding(symmetric: bool, act_order: bool) -> None:
    grid = Grid(4, symmetric)
    found = gptq.quantized(weight(), inputs(activations()), grid, GROUP, act_order=act_order)
    assert (found.order is not None) == act_order
    rows = activations()
    assert loss(found.dequantized(), rows) < 0.3 * loss(nearest(grid).dequantized(), rows)


def test_gptq_has_nothing_to_make_up_for_where_inputs_know_nothing_of_each_other() -> None:
    alone = Inputs(COLUMNS, torch.device("cpu"))
    alone.add(torch.eye(COLUMNS) * COLUMNS**0.5)
    grid = Grid(4, symmetric=True)
    found = gptq.quantized(weight(), alone, grid, GROUP, act_order=False)
    groups = weight().view(OUT, -1, GROUP)
    expected = grid.nearest(weight(), grid.best(groups, lambda error: error.square().sum(dim=-1)))
    assert torch.equal(found.values, expected.values)


def test_gptq_survives_channels_that_are_always_zero_and_data_that_is_too_little() -> None:
    rows = activations()[:10]
    rows[:, :20] = 0.0
    found = gptq.quantized(weight(), inputs(rows), Grid(4, symmetric=True), GROUP, act_order=False)
    assert found.dequantized().isfinite().all()
    torch.testing.assert_close(found.dequantized()[:, :20], weight()[:, :20], atol=0.03, rtol=0)


def test_gptq_says_so_where_activations_are_no_numbers() -> None:
    rows = activations()
    rows[3, 3] = float("nan")
    with pytest.raises(ModelCorrupt, match="not numbers"):
        gptq.quantized(weight(), inputs(rows), Grid(4, symmetric=True), GROUP, act_order=False)


def test_a_group_may_be_larger_than_a_block_and_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, given = Grid(4, symmetric=True), inputs(activations())
    whole = gptq.quantized(weight(), given, grid, GROUP, act_order=False)
    monkeypatch.setattr(gptq, "BLOCK", 20)
    cut = gptq.quantized(weight(), given, grid, GROUP, act_order=False)
    assert (whole.integers() == cut.integers()).float().mean() > 0.99  # sums in another order round otherwise


def test_awq_does_less_to_the_output_than_rounding() -> None:
    grid, rows = Grid(4, symmetric=False), activations()
    given = inputs(rows)
    scales = awq.best_scales([(weight(), given)], grid, GROUP, torch.arange(COLUMNS))
    found = awq.quantized(weight(), given, grid, GROUP, scales)
    assert loss(found.dequantized() / scales, rows) < 0.5 * loss(nearest(grid).dequantized(), rows)
    assert scales[5] > scales.median()  # a large channel is worth more steps


def test_awq_gives_columns_of_one_source_one_scale() -> None:
    sources = torch.arange(COLUMNS) // 4
    rows, grid = activations(), Grid(4, symmetric=False)
    scales = awq.best_scales([(weight(), inputs(rows))], grid, GROUP, sources)
    assert scales.shape == (COLUMNS // 4,)
    found = awq.quantized(weight(), inputs(rows), grid, GROUP, scales[sources])
    assert loss(found.dequantized() / scales[sources], rows) < loss(nearest(grid).dequantized(), rows)


def test_awq_gives_linears_of_one_source_one_scale() -> None:
    """The best for both, and whoever is given more rows counts for more."""
    grid, sources = Grid(4, symmetric=False), torch.arange(COLUMNS)
    many, few = activations(), activations(seed=1)[:100] * torch.linspace(0.01, 10, COLUMNS)
    linears = [(weight(), inputs(many)), (weight().flip(0), inputs(few))]
    together, first = awq.best_scales(linears, grid, GROUP, sources), awq.best_scales(linears[:1], grid, GROUP, sources)
    second = awq.best_scales(linears[1:], grid, GROUP, sources)
    assert (together - first).abs().mean() < (together - second).abs().mean()


def test_awq_leaves_what_gains_nothing() -> None:
    """Channels that are all alike need no scales."""
    alike = Inputs(COLUMNS, torch.device("cpu"))
    alike.add(torch.randn(4000, COLUMNS, generator=torch.Generator().manual_seed(3)).sign())
    scales = awq.best_scales([(weight(), alike)], Grid(4, symmetric=False), GROUP, torch.arange(COLUMNS))
    torch.testing.assert_close(scales, torch.ones(COLUMNS), atol=0.02, rtol=0)
