from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.model.ranks import SingleRank
from penstock.model.stages import Stage
from penstock.runner.step_meter import StepMeter, communication_of


def test_what_ranks_spend_beside_steps_is_not_counted() -> None:
    link: Any = SimpleNamespace(communication_s=2.0)
    meter = StepMeter(communication_of(SingleRank(), Stage(range(1), None, link)))
    with meter.step():
        link.communication_s += 0.5
    link.communication_s += 4.0  # for texts
    with meter.step(is_waited_for=False):
        busy_s = meter.busy_s
        link.communication_s += 0.25
    assert (meter.num_steps, meter.communication_s) == (2, pytest.approx(0.75))
    assert meter.busy_s == busy_s > 0  # the second one is still under way


def test_nobody_knows_the_communication_of_ranks_that_do_not_count_it() -> None:
    meter = StepMeter(communication_of(SingleRank(), Stage()))
    with meter.step():
        meter.add_communication(1.0)
    assert meter.communication_s is None


def test_a_step_that_fails_is_none() -> None:
    meter = StepMeter()
    with pytest.raises(MemoryError), meter.step():
        raise MemoryError
    assert (meter.num_steps, meter.busy_s) == (0, 0.0)
