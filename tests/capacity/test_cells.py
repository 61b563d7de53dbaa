"""The roofline against every cell that was measured on an H200."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tools.roofline import ranks
from tools.roofline.cells import MEASURED, Cell, markdown, predict

from penstock.capacity.step_cost import ENGINES

PAGE, BENCHMARKS = (Path(__file__).parents[2] / "docs" / name for name in ("plan.md", "benchmarks.md"))
NAMES = [(engine, *row, workload) for engine, rows in MEASURED.items() for row in rows for workload in rows[row]]


@cache
def cells(engine: str) -> dict[tuple[str, str, str], Cell]:
    return {(cell.shape, cell.weights, cell.workload): cell for cell in predict(engine, ENGINES[engine])}


@pytest.mark.parametrize(("engine", "shape", "weights", "workload"), NAMES)
def test_a_cell_is_predicted_within_a_fifth(engine: str, shape: str, weights: str, workload: str) -> None:
    cell = cells(engine)[shape, weights, workload]
    assert 0.8 <= cell.ratio <= 1.2, f"{engine} {cell}"


def test_every_cell_of_the_table_is_there() -> None:
    assert [sum(map(len, rows.values())) for rows in MEASURED.values()] == [19, 19]


@pytest.mark.parametrize("engine", MEASURED)
def test_the_page_shows_what_is_predicted(engine: str) -> None:
    assert markdown(list(cells(engine).values())) in PAGE.read_text(), "python -m tools.roofline --shipped"


def test_the_page_shows_the_check_of_what_is_predicted_for_several_gpus() -> None:
    assert ranks.markdown(ranks.checked()) in BENCHMARKS.read_text(), "python -m tools.roofline --ranks"


@pytest.mark.parametrize("each", [*ranks.checked()], ids=lambda each: f"{each.shape}-{each.streams}")
def test_steps_of_ranks_on_one_gpu_are_predicted_within_a_third(each: ranks.Checked) -> None:
    assert 0.8 <= each.predicted_s / each.one_s <= 1.2
    assert 0.7 <= each.communication_s / each.added_s <= 1.3
