"""The engine's loop over a mailbox that the test fills, a step at a time."""

from __future__ import annotations

import pytest

from penstock.core.request import Request
from penstock.engine.fake import FakeRunner
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import Abort, FromEngine, StepReport, Stop, Submit, ToEngine
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.scheduler import Scheduler


class StillClock:
    def now(self) -> float:
        return 0.0


class Scripted:
    """Mail by the number of steps that were reported when it comes. An engine with nothing to do stops."""

    def __init__(self, mail: dict[int, list[ToEngine]]) -> None:
        self._mail = mail
        self.reports: list[StepReport] = []

    def receive(self, *, wait: bool) -> list[ToEngine]:
        return self._mail.pop(len(self.reports), []) or ([Stop()] if wait else [])

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        self.reports.append(message)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_aborted_request_is_in_no_step_but_the_one_that_runs(overlaps: bool) -> None:
    requests = [Request(name, [1, 2, 3], max_tokens=100) for name in ("a", "b")]
    box = Scripted({0: [Submit(request) for request in requests], 5: [Abort("a"), Abort("b")]})
    scheduler = Scheduler(KVCache(128, 4), StepBudget(64, target_s=None, floor=4), max_num_seqs=4)
    EngineLoop(scheduler, FakeRunner(128, 4, overlaps=overlaps), box, StillClock()).run()
    last = box.reports[-1].measured.load
    assert last.steps == 6
    assert (last.num_running, last.num_waiting, last.kv_active_tokens) == (0, 0, 0)
    assert all(report.events == [] for report in box.reports[5:]), "nothing is heard of it any more"
