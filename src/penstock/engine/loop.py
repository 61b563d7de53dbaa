"""The engine's loop: a fold over the step in flight. Decide, run, record; the mailbox is read between steps.

It owns the scheduler and drives the runner. Nothing here knows what a token means or what a device is.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.clock import Clock
from penstock.core.errors import UnsupportedParameter
from penstock.core.measurements import (
    EngineLoad,
    EngineMeasurements,
    EngineTotals,
    PrefixCacheUse,
    SpeculationTotals,
)
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.engine.embedding import EmbedQueue
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import (
    Abort,
    CacheChanges,
    Charge,
    Embed,
    StepFigures,
    StepReport,
    Stop,
    Submit,
)
from penstock.engine.ports import Guides, MailboxPort
from penstock.engine.step_log import StepLog
from penstock.sched.cost import Work, split
from penstock.sched.drafting import Drafts
from penstock.sched.plan import Runner, StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation import Speculation

log = logging.getLogger("penstock.engine")

_LOOK_S = 0.1  # how often what takes a look at every sequence is looked at
_NO_STEP = StepFigures()
_GUIDE_WAIT_S = 0.002  # for guides, when there is nothing else to do; then the mail is looked at again
_MAX_FAILED_STEPS = 3  # in a row; a device that fails again and again is left to a fresh process


@dataclass(frozen=True)
class InFlight:
    plan: StepPlan
    handle: StepHandle
    submitted_s: float
    is_ahead: bool = False  # of the result of the step before


class EngineLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        mailbox: MailboxPort,
        clock: Clock,
        work: Work = Work(),  # noqa: B008 (frozen)
        step_log: StepLog | None = None,
        guides: Guides | None = None,
        speculation: Speculation | None = None,
        embeddings: EmbedQueue | None = None,
    ) -> None:
        """`work`: by which a step's time is split over its sequences; `step_log` is closed with the loop; without
        `guides` nobody may ask for a guided answer."""
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._clock = clock
        self._steps = 0
        self._failed_steps = 0
        self._work = work
        self._step_log = step_log
        self._guides = guides
        self._speculation = speculation
        self._embeddings = embeddings or EmbedQueue(None, clock)
        self._busy_s = 0.0
        self._read_tokens = 0
        self._fragmentation, self._looked_s = 0.0, 0.0
        self._last_commit_s = 0.0
        self._received_tokens = 0
        self._ahead_tokens = 0  # of prompts, in the step that is under way while another is committed
        self._is_stopped = False

    def run(self) -> None:
        """Until told to stop, or the server is gone."""
        gc.collect()
        gc.freeze()  # what is loaded by now stays: to look through it again and again takes 100 ms at a time
        in_flight: InFlight | None = None
        try:
            while not self._is_stopped:
                is_idle = in_flight is None and not (self._scheduler.has_work or self._embeddings.has_work)
                self._read_mail(wait=is_idle)
                in_flight = self._advance(in_flight)
                if self._embeddings.has_work:
                    self._embed()
        except Disconnected:
            log.info("the server is gone; the engine stops")
        finally:
            if self._step_log is not None:
                self._step_log.close()

    def _advance(self, previous: InFlight | None) -> InFlight | None:
        """Step n+1 goes out before n is read, where the device allows it and nobody guesses what comes after it."""
        now = self._clock.now()
        if previous is not None and not (self._runner.overlaps and self._goes_ahead(previous)):
            self._ahead_tokens = 0
            self._commit(previous)
            previous = None
            now = self._last_commit_s if self._runner.overlaps and not self._failed_steps else self._clock.now()
        plan = self._scheduler.plan(now, self._drafts() if previous is None else {})
        current = self._submit(plan, now, is_ahead=previous is not None) if plan is not None else None
        if plan is None and previous is None and self._guides is not None and self._scheduler.has_work:
            self._guides.wait(_GUIDE_WAIT_S)  # those who are left wait for nothing else
        if previous is not None:
            self._ahead_tokens = current.plan.num_tokens - len(current.plan.slices) if current is not None else 0
            self._commit(previous)
        return self._choose(current) if current is not None and self._guides is not None else current

    def _embed(self) -> None:
        """A batch of whole texts, between two steps."""
        done = self._embeddings.step()
        self._busy_s += done.device_s
        for answer in done.answers:
            self._mailbox.send(answer)

    def _goes_ahead(self, previous: InFlight) -> bool:
        """Those who have drafts in flight cannot, and others had better stay with them."""
        if self._speculation is None:
            return True
        if any(planned.ahead for planned in previous.plan.slices):
            return False
        try:
            return not self._speculation.wants(self._scheduler.soon_decoding)
        except Exception:
            self._stop_guessing()
            return True

    def _drafts(self) -> Drafts:
        """What may come next, for those for whom it pays to guess."""
        if self._speculation is None:
            return {}
        try:
            return self._speculation.drafts(self._scheduler.decoding)
        except Exception:
            self._stop_guessing()
            return {}

    def _stop_guessing(self) -> None:
        log.exception("drafts could not be made; the engine goes on without")
        self._speculation = None

    def _choose(self, step: InFlight) -> InFlight | None:
        """What could not be chosen before the tokens of the step before were known."""
        try:
            step.handle.choose()
        except Exception:
            self._give_up(step.plan)
            return None
        return step

    def _submit(self, plan: StepPlan, now: float, *, is_ahead: bool) -> InFlight | None:
        try:
            return InFlight(plan, self._runner.submit(plan), now, is_ahead)
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
        self._busy_s += cost_s
        if self._step_log is not None:
            self._step_log.add(step.plan, cost_s)
        if self._speculation is not None:
            self._speculation.observe(step.plan, result, cost_s, is_ahead=step.is_ahead)
        held_tokens = self._scheduler.cache.held_tokens  # before those who end give their blocks back
        events = self._scheduler.commit(step.plan, result, now)
        if self._guides is not None:
            self._guides.go()
        shares = split(step.plan.slices, events, cost_s, self._work)
        num_drafts = sum([len(planned.ahead) for planned in step.plan.slices]) if self._speculation is not None else 0
        if not num_drafts:
            prefill_tokens = shares.num_tokens - shares.num_decodes
            self._scheduler.cache.observe(prefill_tokens, cost_s, shares.num_decodes, step.plan.copies)
            self._scheduler.budget.observe(shares.num_tokens, shares.num_decodes, elapsed_s)
        self._read_tokens += min(shares.context, held_tokens)
        self._look(now)
        charges = [Charge(one.request_id, one.seconds, one.num_blocks * cost_s) for one in shares.shares]
        figures = StepFigures(shares.num_tokens, len(step.plan.slices), num_drafts, cost_s, shares.price)
        self._report(events, figures, charges)

    def _look(self, now: float) -> None:
        if now - self._looked_s >= _LOOK_S:
            self._looked_s, self._fragmentation = now, self._scheduler.fragmentation

    def _give_up(self, plan: StepPlan) -> None:
        """A step failed: those in it get an error, everybody else goes on."""
        log.exception("a step with %d sequences and %d tokens failed", len(plan.slices), plan.num_tokens)
        self._failed_steps += 1
        if self._failed_steps >= _MAX_FAILED_STEPS:
            raise RuntimeError(f"{self._failed_steps} steps in a row failed")
        ended = [s.request_id for s in plan.slices if self._scheduler.abort(s.request_id)]
        message = "the engine failed while running this request"
        events = [TokenEvent(request_id, finish=FinishReason.ERROR, error=message) for request_id in ended]
        self._scheduler.adapters.undo(plan)
        self._scheduler.cache.undo(plan.copies)
        self._report(events)

    def _read_mail(self, *, wait: bool) -> None:
        messages = self._mailbox.receive(wait=wait)
        aborted = False
        for message in messages:
            match message:
                case Submit(request):
                    self._received_tokens += len(request.prompt_ids)
                    self._begin(request)
                case Abort(request_id):
                    self._embeddings.abort(request_id)
                    aborted |= self._scheduler.abort(request_id)
                case Embed():
                    self._embeddings.add(message)
                case Stop():
                    self._is_stopped = True
        if aborted and not self._scheduler.has_work:  # no step will report that the engine is idle now
            self._report([])

    def _begin(self, request: Request) -> None:
        if request.guide is None:
            self._scheduler.submit(request, self._clock.now())
        elif self._guides is not None:
            self._scheduler.submit(request, self._clock.now(), self._guides.open(request))
        else:
            message = "this engine cannot keep an answer to a guide"
            code = UnsupportedParameter.code
            event = TokenEvent(request.id, finish=FinishReason.ERROR, error=message, error_code=code)
            self._report([event])

    def _report(self, events: list[TokenEvent], step: StepFigures = _NO_STEP, charges: Sequence[Charge] = ()) -> None:
        routing = self._scheduler.cache.routing
        changes = routing.changes() if routing is not None else None
        cache = CacheChanges(*changes) if changes is not None else None
        self._mailbox.send(StepReport(events, self._measured(), step, cache, list(charges)))

    def _measured(self) -> EngineMeasurements:
        scheduler = self._scheduler
        counters, cache = scheduler.counters, scheduler.cache
        return EngineMeasurements(
            EngineLoad(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                queued_tokens=scheduler.queued_tokens + self._ahead_tokens,
                kv_active_tokens=cache.held_tokens,
                kv_fragmentation=self._fragmentation if scheduler.num_running else 0.0,
                budget_tokens=scheduler.budget.tokens,
                steps=self._steps,
            ),
            EngineTotals(
                busy_s=self._busy_s,
                generated_tokens=counters.generated_tokens,
                received_tokens=self._received_tokens,
                preemptions=counters.preemptions,
                recomputed_tokens=counters.recomputed_tokens,
                read_tokens=self._read_tokens,
                forced_tokens=counters.forced_tokens,
                mask_wait_s=self._guides.waited_s if self._guides is not None else 0.0,
            ),
            PrefixCacheUse(
                prompt_tokens=counters.prompt_tokens,
                cached_tokens=counters.cached_tokens,
                loaded_tokens=cache.loaded_tokens,
                evictions=cache.pool.counters.evictions,
                cached_blocks=cache.pool.num_cached,
            ),
            SpeculationTotals(counters.drafted_tokens, counters.accepted_tokens),
        )
