"""The engine's loop over a mailbox that the test fills, a step at a time."""

from __future__ import annotations

import pytest

from penstock.core.request import FinishReason, Request
from penstock.engine.engine import Engine
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
    EngineLoop(Engine(scheduler, FakeRunner(128, 4, overlaps=overlaps)), box, StillClock()).run()
    last = box.reports[-1].measured.load
    assert last.steps == 6
    assert (last.num_running, last.num_waiting, last.kv_active_tokens) == (0, 0, 0)
    assert all(report.events == [] for report in box.reports[5:]), "nothing is heard of it any more"


class TickingClock:
    """A second for every look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        self._now_s += 1.0
        return self._now_s


def test_a_request_pays_for_every_device_that_works_on_its_steps() -> None:
    def paid(num_devices: int) -> float:
        box = Scripted({0: [Submit(Request("a", [1, 2, 3], max_tokens=5))]})
        scheduler = Scheduler(KVCache(128, 4), StepBudget(64, target_s=None, floor=4), max_num_seqs=4)
        engine = Engine(scheduler, FakeRunner(128, 4), num_devices=num_devices)
        EngineLoop(engine, box, TickingClock()).run()
        return sum(charge.device_s for report in box.reports for charge in report.charges)

    assert paid(1) > 0
    assert paid(4) == 4 * paid(1)


class Shared(Scripted):
    """The mailbox of a process with several engines."""

    def events(self, model: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for report in self.reports:
            for event in report.events if report.model == model else ():
                found.setdefault(event.request_id, []).extend(event.token_ids)
        return found


def small_engine(model: str, num_blocks: int, *, overlaps: bool = False) -> Engine:
    scheduler = Scheduler(KVCache(num_blocks, 4), StepBudget(64, target_s=None, floor=4), max_num_seqs=4)
    return Engine(scheduler, FakeRunner(num_blocks, 4, overlaps=overlaps), model=model)


def test_engines_that_share_a_process_get_their_own_messages_and_mark_their_own_reports() -> None:
    """Each answers as it would alone, with a cache of its own; an abort names no model and reaches the right one."""
    prompts = {"a": [1, 2, 3], "b": [4, 5], "gone": [6]}
    mail: list[ToEngine] = [
        Submit(Request("a", prompts["a"], max_tokens=9), "small"),
        Submit(Request("b", prompts["b"], max_tokens=7), "large"),
        Submit(Request("gone", prompts["gone"], max_tokens=50), "large"),
    ]
    box = Shared({0: mail, 4: [Abort("gone")]})
    engines = {"small": small_engine("small", 64), "large": small_engine("large", 128, overlaps=True)}
    EngineLoop(engines, box, StillClock()).run()
    assert box.events("small").keys() == {"a"}
    large = box.events("large")
    assert len(large.pop("gone")) < 50
    assert large.keys() == {"b"}
    for name, model, count in (("a", "small", 9), ("b", "large", 7)):
        alone = Shared({0: [Submit(Request(name, prompts[name], max_tokens=count))]})
        EngineLoop(small_engine("", 64), alone, StillClock()).run()
        assert box.events(model)[name] == alone.events("")[name]
        assert len(alone.events("")[name]) == count
    assert all(engine.is_idle for engine in engines.values())


def test_a_request_for_a_model_that_no_engine_serves_is_answered_with_an_error() -> None:
    """Where several engines share a process, nobody else would answer it."""
    mail: list[ToEngine] = [
        Submit(Request("lost", [1], max_tokens=3), "no such"),
        Submit(Request("a", [1, 2], max_tokens=3), "small"),
    ]
    box = Shared({0: mail})
    EngineLoop({"small": small_engine("small", 64), "large": small_engine("large", 64)}, box, StillClock()).run()
    (refused,) = [event for report in box.reports for event in report.events if event.request_id == "lost"]
    assert refused.finish is FinishReason.ERROR
    assert "no such" in (refused.error or "")
    assert len(box.events("small")["a"]) == 3
