"""Steps that are taken back."""

from __future__ import annotations

import pytest

from penstock.fleet.steps import StepRecord


@pytest.mark.parametrize(
    ("steps", "reversals"),
    [
        ([(0, 1), (10, 2), (400, 1)], 0),
        ([(0, 1), (10, 2), (300, 1)], 1),
        ([(0, 1), (10, 2), (60, 3), (120, 4)], 0),
        ([(0, 1), (10, 2), (60, 1), (120, 2), (180, 1)], 3),
        ([(0, 4), (10, 3), (40, 2), (100, 3)], 1),
        ([(0, 1), (10, 2), (60, 1), (4000, 1)], 0),
    ],
    ids=["slow", "soon", "up only", "again and again", "down, then up", "long ago"],
)
def test_reversals_are_counted(steps: list[tuple[float, int]], reversals: int) -> None:
    record = StepRecord()
    for at, wanted in steps:
        record.observe(wanted, at)
    assert record.num_reversals == reversals
