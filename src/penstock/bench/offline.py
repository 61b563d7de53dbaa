"""The engine without a server: all requests handed over at once, the real loop, and the time to the last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.clock import Clock
from penstock.core.request import Request, TokenEvent
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import FromEngine, StepReport, Stop, Submit, ToEngine
from penstock.sched.plan import Runner
from penstock.sched.scheduler import Scheduler


@dataclass
class OfflineMailbox:
    """The mailbox of an engine's loop when nobody is connected: it is told to stop once it is idle."""

    requests: list[Request]
    events: list[TokenEvent] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        if self.requests:
            handed, self.requests = self.requests, []
            return [Submit(request) for request in handed]
        return [Stop()] if wait else []

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        self.events += message.events
        self.reports.append(message)


@dataclass(frozen=True)
class OfflineRun:
    seconds: float
    events: list[TokenEvent]
    steps: list[StepReport]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.events)


def run_offline(requests: list[Request], scheduler: Scheduler, runner: Runner, clock: Clock) -> OfflineRun:
    mailbox = OfflineMailbox(list(requests))
    started_s = clock.now()
    EngineLoop(Engine(scheduler, runner), mailbox, clock).run()
    return OfflineRun(clock.now() - started_s, mailbox.events, mailbox.reports)
