"""A step that fails at the first rank: alone it is one step's failure; with others it is the end of all of them."""

from __future__ import annotations

import pytest

from penstock.core.ranks import RankLost
from penstock.core.sampling import SamplingParams
from penstock.core.settings import EngineSettings
from penstock.model.random_weights import RandomCheckpoint
from penstock.runner.assemble import assemble
from penstock.runner.step_inputs import StepInputs
from penstock.sched.plan import SampleSpec, Slice, StepPlan
from tests.runner.small import CONFIG


def test_others_are_in_the_middle_of_the_step_that_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EngineSettings(device="cpu", dtype="float32", max_loras=0)
    runner = assemble(RandomCheckpoint(CONFIG), settings, lambda *_: None).rank_runner
    spec = SampleSpec(SamplingParams(temperature=0.0), history=[], prompt_len=3, position=3)
    plan = StepPlan([Slice("a", 0, 3, [1, 2, 3], [0], spec, epoch=0)])

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(runner, "_model", fail)
        with pytest.raises(MemoryError):
            runner.submit(plan)
    told: list[StepInputs] = []
    runner.lead(told.append)
    runner.submit(plan)
    assert len(told) == 1
    monkeypatch.setattr(runner, "_model", fail)
    with pytest.raises(RankLost, match=r"rank 0 of the model is lost: its part of a step failed: .*no room"):
        runner.submit(plan)
