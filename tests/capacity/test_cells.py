"""The roofline against every cell that was measured on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.roofline.cells import MEASURED, Cell, markdown, predict

from penstock.capacity.step_cost import ENGINES

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
CELLS = [(engine, cell) for engine in MEASURED for cell in predict(engine, ENGINES[engine])]


@pytest.mark.parametrize(("engine", "cell"), CELLS, ids=lambda each: getattr(each, "workload", each))
def test_a_cell_is_predicted_within_a_fifth(engine: str, cell: Cell) -> None:
    assert 0.8 <= cell.ratio <= 1.2, f"{engine} {cell}"


def test_every_cell_of_the_table_is_there() -> None:
    assert [sum(map(len, rows.values())) for rows in MEASURED.values()] == [19, 19]


@pytest.mark.parametrize("engine", MEASURED)
def test_the_page_shows_what_is_predicted(engine: str) -> None:
    assert markdown(predict(engine, ENGINES[engine])) in PAGE.read_text(), "python -m tools.roofline --shipped"
