"""Requests come when their adapters do: read by a thread, kept while they are needed, dropped when they are not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.clock import MonotonicClock
from penstock.core.errors import ModelMissing
from penstock.core.request import AdapterRef, FinishReason, Request, TokenEvent
from penstock.engine.engine import Engine as RealEngine
from penstock.engine.fake import FakeRunner
from penstock.engine.loop import EngineLoop
from penstock.engine.lora import LoraManager
from penstock.engine.messages import (
    Abort,
    AdapterAnswer,
    AdapterState,
    FromEngine,
    LoadAdapter,
    StepReport,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.lora import AdapterSlots
from penstock.sched.scheduler import Scheduler
from penstock.sched.sequence import Sequence
from tests.waiting import GIVE_UP_S, eventually


class Weights:
    """Reading waits for the test, adapter by adapter."""

    def __init__(self) -> None:
        self.may_read: dict[str, threading.Event] = {}
        self.kept: set[str] = set()
        self.cleared: list[int] = []
        self.num_forgotten = 0

    def read(self, path: str, digest: str) -> Any:
        if digest in self.may_read:
            assert self.may_read[digest].wait(GIVE_UP_S)
        if path == "nowhere":
            raise ModelMissing("there is no such directory")
        return digest

    def keep(self, adapter: Any) -> None:
        self.kept.add(adapter)

    def forget(self, digest: str) -> None:
        self.kept.discard(digest)
        self.num_forgotten += 1

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)


class Mailbox:
    """The messages of a list, all at once; it must not be waited for before the last answer has ended."""

    def __init__(self, messages: list[ToEngine]) -> None:
        self._messages = messages
        self.events: list[TokenEvent] = []
        self.answers: list[AdapterAnswer] = []

    def receive(self, *, wait: bool) -> list[ToEngine]:
        messages, self._messages = self._messages, []
        if messages or not wait:
            return messages
        assert self.events, "the engine would wait for ever"
        assert self.events[-1].finish is not None, "the engine would wait for ever"
        return [Stop()]

    def send(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self.events += message.events
            case AdapterAnswer():
                self.answers.append(message)


class Engine:
    def __init__(self, max_host: int = 2, num_slots: int = 2) -> None:
        self.weights, self.slots = Weights(), AdapterSlots(num_slots)
        self.lora = LoraManager(self.weights, self.slots, max_host=max_host)
        self.news: list[AdapterAnswer | AdapterState] = []
        self.failures: list[TokenEvent] = []

    def hear(self, *messages: ToEngine) -> list[ToEngine]:
        passed = self.lora.receive(messages)
        self.news += self.lora.take_answers()
        self.failures += self.lora.take_failures()
        return passed

    def until(self, condition: Callable[[], bool]) -> list[ToEngine]:
        """All that comes meanwhile."""
        found: list[ToEngine] = []

        def look() -> bool:
            found.extend(self.hear())
            return condition()

        eventually(look)
        return found

    def answers(self) -> list[AdapterAnswer]:
        return [message for message in self.news if isinstance(message, AdapterAnswer)]

    def load(self, *digests: str) -> None:
        for digest in digests:
            count = len(self.answers())
            self.hear(LoadAdapter(digest, f"/{digest}"))
            self.until(lambda count=count: len(self.answers()) > count)  # type: ignore[misc]

    def run(self, request: Request) -> Sequence:
        """As the scheduler would."""
        sequence = Sequence(request, arrival_s=0.0, order=0, block_size=4)
        self.slots.arrive(sequence)
        assert self.slots.lets_in(sequence, 0.0)
        self.slots.enter(sequence)
        return sequence


def request(name: str, adapter: str | None = None) -> Request:
    return Request(name, [1, 2, 3], 4, adapter=AdapterRef(adapter, adapter) if adapter else None)


def test_request_passes_at_once_if_its_adapter_is_there() -> None:
    engine = Engine()
    engine.load("a")
    mail: list[ToEngine] = [Submit(request("plain")), Submit(request("adapted", "a")), Abort("plain"), Stop()]
    assert engine.hear(*mail) == mail
    assert engine.answers() == [AdapterAnswer("a")]


def test_request_waits_for_an_adapter_that_is_being_read_and_nobody_waits_for_it() -> None:
    engine = Engine()
    engine.weights.may_read["a"] = threading.Event()
    assert engine.hear(LoadAdapter("a", "/a"), Submit(request("r", "a")), Submit(request("plain"))) == [
        Submit(request("plain"))
    ]
    assert engine.hear() == []
    engine.weights.may_read["a"].set()
    assert engine.until(lambda: bool(engine.answers())) == [Submit(request("r", "a"))]


def test_engine_that_is_idle_wakes_up_when_an_adapter_is_read() -> None:
    """The loop waits for the adapter, not for more mail: that would be for ever."""
    requests: list[ToEngine] = [LoadAdapter("a", "/a"), Submit(request("r", "a"))]
    box = Mailbox(requests)
    slots = AdapterSlots(2)
    scheduler = Scheduler(KVCache(32, 4), StepBudget(64, target_s=None, floor=4), max_num_seqs=4, adapters=slots)
    lora = LoraManager(Weights(), slots, max_host=2)
    EngineLoop(RealEngine(scheduler, FakeRunner(32, 4), lora=lora), box, MonotonicClock()).run()
    assert [len(event.token_ids) for event in box.events] == [1, 1, 1, 1]
    assert box.answers == [AdapterAnswer("a")]


def test_aborted_request_does_not_come_when_its_adapter_does() -> None:
    engine = Engine()
    engine.weights.may_read["a"] = threading.Event()
    engine.hear(LoadAdapter("a", "/a"), Submit(request("r", "a")), Submit(request("s", "a")))
    assert engine.hear(Abort("r")) == []
    engine.weights.may_read["a"].set()
    assert engine.until(lambda: bool(engine.answers())) == [Submit(request("s", "a"))]


def test_adapter_that_cannot_be_read_fails_those_who_waited() -> None:
    engine = Engine()
    engine.hear(LoadAdapter("a", "nowhere"), Submit(request("r", "a")))
    engine.until(lambda: bool(engine.answers()))
    assert engine.answers() == [AdapterAnswer("a", "model_missing", "there is no such directory")]
    assert [(event.request_id, event.finish, event.error) for event in engine.failures] == [
        ("r", FinishReason.ERROR, "there is no such directory")
    ]
    engine.hear(Submit(request("s", "a")))
    assert [event.error for event in engine.failures[1:]] == ["its adapter is not loaded"]


def test_host_memory_holds_the_ones_that_were_used_last_and_the_others_are_read_again() -> None:
    engine = Engine(max_host=2)
    engine.load("a", "b")
    engine.hear(Submit(request("r", "a")))
    engine.load("c")
    assert engine.weights.kept == {"a", "c"}
    assert engine.hear(Submit(request("s", "b"))) == []
    assert engine.until(lambda: "b" in engine.weights.kept) == [Submit(request("s", "b"))]
    assert engine.weights.kept == {"b", "c"}


def test_adapter_that_a_sequence_needs_stays_and_others_wait_for_room() -> None:
    engine = Engine(max_host=1)
    engine.load("a")
    engine.hear(Submit(request("r", "a")))
    sequence = engine.run(request("r", "a"))
    assert engine.hear(LoadAdapter("b", "/b"), Submit(request("s", "b"))) == []
    assert engine.hear() == []
    assert engine.weights.kept == {"a"}
    engine.slots.leave(sequence)
    assert engine.until(lambda: engine.weights.kept == {"b"}) == [Submit(request("s", "b"))]


def test_unloading_waits_for_the_last_that_runs_and_refuses_new_ones() -> None:
    engine = Engine()
    engine.load("a")
    engine.hear(Submit(request("r", "a")))
    sequence = engine.run(request("r", "a"))
    engine.hear(UnloadAdapter("a"))
    assert engine.hear(Submit(request("late", "a"))) == []
    assert len(engine.answers()) == 1
    engine.slots.leave(sequence)
    engine.hear()
    assert engine.news[-2:] == [AdapterState([], [], 1, 1), AdapterAnswer("a")], "where it is, before that it is gone"
    assert len(engine.answers()) == 2
    assert (engine.weights.kept, engine.weights.cleared, engine.slots.resident) == (set(), [0], [])


def test_slots_of_a_parked_engine_are_left_alone_until_it_is_awake() -> None:
    """Their memory is away; what is on the host comes and goes."""
    engine = Engine()
    engine.load("a")
    engine.slots.leave(engine.run(request("r", "a")))
    engine.lora.is_parked = True
    engine.hear(UnloadAdapter("a"))
    engine.load("b")
    assert (engine.weights.cleared, engine.weights.kept) == ([], {"a", "b"})
    engine.lora.is_parked = False
    engine.hear()
    assert engine.answers()[-1] == AdapterAnswer("a")
    assert (engine.weights.cleared, engine.weights.kept) == ([0], {"b"})


@pytest.mark.parametrize("is_late", [False, True])
def test_adapter_may_be_unloaded_while_it_is_read(is_late: bool) -> None:
    engine = Engine()
    engine.weights.may_read["a"] = threading.Event()
    engine.hear(LoadAdapter("a", "/a"))
    engine.hear(UnloadAdapter("a"))
    assert engine.answers() == [AdapterAnswer("a")]
    if is_late:  # and loaded again before it was read
        engine.hear(LoadAdapter("a", "/a"))
    engine.weights.may_read["a"].set()
    engine.until(lambda: not engine.lora._reading)
    assert engine.weights.kept == ({"a"} if is_late else set())
    assert engine.weights.num_forgotten == (1 if is_late else 2)  # other ranks have read it by the second


def test_last_slot_is_not_pinned() -> None:
    engine = Engine(num_slots=2)
    engine.hear(LoadAdapter("a", "/a", pinned=True))
    engine.until(lambda: len(engine.answers()) == 1)
    engine.hear(LoadAdapter("b", "/b", pinned=True))
    engine.until(lambda: len(engine.answers()) == 2)
    assert [answer.code for answer in engine.answers()] == ["", "conflict"]
    engine.hear(LoadAdapter("a", "/a"))
    assert not engine.slots.is_pinned("a")


def test_where_adapters_are_is_told_when_it_changes() -> None:
    engine = Engine()
    engine.load("a", "b")
    engine.run(request("r", "b"))
    engine.hear()
    engine.hear()
    told = [message for message in engine.news if isinstance(message, AdapterState)]
    assert told == [
        AdapterState([], ["a"], 0, 1),
        AdapterState([], ["a", "b"], 0, 2),
        AdapterState(["b"], ["a", "b"], 1, 2),
    ]
