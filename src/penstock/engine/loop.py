"""The engine's loop: a fold over the step in flight. Decide, run, record; the mailbox is read between steps.

It owns the scheduler and drives the runner. Nothing here knows what a token means or what a device is.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Protocol

from penstock.core.clock import Clock
from penstock.core.request import FinishReason, TokenEvent
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import Abort, CacheChanges, EngineStats, FromEngine, StepReport, Stop, Submit, ToEngine
from penstock.sched.plan import Runner, StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler

log = logging.getLogger("penstock.engine")

_MOST_FAILED_STEPS = 3  # in a row; a device that fails again and again is left to a fresh process


class Mail(Protocol):
    """How requests come in and news go out: a socket's mailbox, or anything like it."""

    def receive(self, *, wait: bool) -> list[ToEngine]: ...

    def send(self, message: FromEngine) -> None: ...


@dataclass(frozen=True)
class InFlight:
    plan: StepPlan
    handle: StepHandle
    submitted_s: float


class EngineLoop:
    def __init__(self, scheduler: Scheduler, runner: Runner, mailbox: Mail, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._clock = clock
        self._steps = 0
        self._failed_steps = 0
        self._last_commit_s = 0.0
        self._is_stopped = False

    def run(self) -> None:
        """Until told to stop, or the server is gone."""
        gc.collect()
        gc.freeze()  # what is loaded by now stays: to look through it again and again takes 100 ms at a time
        in_flight: InFlight | None = None
        try:
            while not self._is_stopped:
                self._read_mail(wait=in_flight is None and not self._scheduler.has_work)
                in_flight = self._advance(in_flight)
        except Disconnected:
            log.info("the server is gone; the engine stops")

    def _advance(self, previous: InFlight | None) -> InFlight | None:
        """Step n+1 goes out before n is read, where the device allows it."""
        if previous is not None and not self._runner.overlaps:
            self._commit(previous)
            previous = None
        now = self._clock.now()
        plan = self._scheduler.plan(now)
        current = self._submit(plan, now) if plan is not None else None
        if previous is not None:
            self._commit(previous)
        return current

    def _submit(self, plan: StepPlan, now: float) -> InFlight | None:
        try:
            return InFlight(plan, self._runner.submit(plan), now)
        except Exception:
            self._give_up(plan)
            return None

    def _commit(self, step: InFlight) -> None:
        try:
            result = step.handle.result()
        except Exception:
            self._give_up(step.plan)
            return
        now = self._clock.now()
        elapsed_s = now - step.submitted_s
        cost_s = now - max(step.submitted_s, self._last_commit_s)
        self._last_commit_s = now
        self._steps += 1
        self._failed_steps = 0
        num_decodes = sum(s.num_tokens == 1 for s in step.plan.slices)
        self._scheduler.budget.observe(step.plan.num_tokens, num_decodes, elapsed_s)
        events = self._scheduler.commit(step.plan, result, now)
        self._report(events, self._stats(step.plan, elapsed_s, cost_s))

    def _give_up(self, plan: StepPlan) -> None:
        """A step failed: those in it get an error, everybody else goes on."""
        log.exception("a step with %d sequences and %d tokens failed", len(plan.slices), plan.num_tokens)
        self._failed_steps += 1
        if self._failed_steps >= _MOST_FAILED_STEPS:
            raise RuntimeError(f"{self._failed_steps} steps in a row failed")
        ended = [s.request_id for s in plan.slices if self._scheduler.abort(s.request_id)]
        message = "the engine failed while running this request"
        events = [TokenEvent(request_id, finish=FinishReason.ERROR, error=message) for request_id in ended]
        self._report(events, self._stats(plan, 0.0))

    def _read_mail(self, *, wait: bool) -> None:
        messages = self._mailbox.receive(wait=wait)
        aborted = False
        for message in messages:
            match message:
                case Submit(request):
                    self._scheduler.submit(request, self._clock.now())
                case Abort(request_id):
                    aborted |= self._scheduler.abort(request_id)
                case Stop():
                    self._is_stopped = True
        if aborted and not self._scheduler.has_work:  # no step will report that the engine is idle now
            self._report([], self._stats(None, 0.0))

    def _report(self, events: list[TokenEvent], stats: EngineStats) -> None:
        routing = self._scheduler.cache.routing
        changes = routing.changes() if routing is not None else None
        self._mailbox.send(StepReport(events, stats, CacheChanges(*changes) if changes is not None else None))

    def _stats(self, plan: StepPlan | None, elapsed_s: float, cost_s: float = 0.0) -> EngineStats:
        scheduler = self._scheduler
        counters, pool = scheduler.counters, scheduler.cache.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.cache.usage,
            cached_blocks=pool.num_cached,
            step_tokens=plan.num_tokens if plan else 0,
            step_sequences=len(plan.slices) if plan else 0,
            step_s=elapsed_s,
            budget_tokens=scheduler.budget.tokens,
            steps=self._steps,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            evictions=pool.counters.evictions,
            cost_s=cost_s,
            queued_tokens=scheduler.queued_tokens,
        )
