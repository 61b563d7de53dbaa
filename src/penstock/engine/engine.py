"""One model's engine: scheduler, KV cache, runner, guides, drafts, LoRA adapters and embeddings as one object.

The engine is a fold. Messages are handed to it, the time is an argument, and what it has to say is taken from `outbox`:
it reads no clock and no mailbox. Devices, masks and adapters on disk are behind `Runner`, `Guides` and `LoraManager`,
which do their work meanwhile. A step is launched, read and committed; on a device that overlaps, the next
one is launched before the last is read. `loop` drives one or several engines in real time, `penstock.sim` in simulated
time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.errors import EngineUnavailable, PenstockError, UnsupportedParameter, UnsupportedTask
from penstock.core.images import are_placed
from penstock.core.measurements import (
    DiskCacheUse,
    EngineLoad,
    EngineMeasurements,
    EngineSpeeds,
    EngineTotals,
    KvTransferTotals,
    PrefixCacheUse,
    SpeculationTotals,
)
from penstock.core.model_config import VisionConfig
from penstock.core.request import FinishReason, Request, TokenEvent
from penstock.engine.embedding import EmbedBatch, EmbedQueue
from penstock.engine.lora import LoraManager
from penstock.engine.messages import (
    Abort,
    CacheChanges,
    Charge,
    Embed,
    Embedded,
    FromEngine,
    Park,
    ParkAnswer,
    RebalanceAnswer,
    RebalanceExperts,
    StepFigures,
    StepReport,
    Submit,
    ToEngine,
    Wake,
)
from penstock.engine.ports import DeviceMemory, Guides
from penstock.engine.rebalancing import ExpertRanks, Rebalancing
from penstock.kv.cache import KVCache
from penstock.sched.cost import Work, split
from penstock.sched.plan import Runner, StepHandle, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation.drafting import Drafts
from penstock.sched.speculation.speculation import Speculation
from penstock.transfer.exchange import KvExchange

log = logging.getLogger("penstock.engine")

_LOOK_S = 0.1  # how often what takes a look at every sequence is looked at
_NO_STEP = StepFigures()
_NO_DISK = DiskCacheUse()
_PARKED = "the engine is parked"
_MAX_FAILED_STEPS = 3  # in a row; a device that fails again and again is left to a fresh process


class Step(NamedTuple):
    """A step on the device."""

    plan: StepPlan
    handle: StepHandle
    submitted_s: float
    is_ahead: bool  # of the result of the step before

    @property
    def prompt_tokens(self) -> int:
        """Tokens in it beyond one of each sequence."""
        return self.plan.num_tokens - len(self.plan.slices)


class Engine:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        work: Work = Work(),  # noqa: B008 (frozen)
        *,
        guides: Guides | None = None,
        speculation: Speculation | None = None,
        embeddings: EmbedQueue | None = None,
        lora: LoraManager | None = None,
        memory: DeviceMemory | None = None,
        experts: ExpertRanks | None = None,
        transfer: KvExchange | None = None,
        num_devices: int = 1,
        model: str = "",
        vision: VisionConfig | None = None,
    ) -> None:
        """`work` splits a step's time over its sequences. Requests for what is None are refused; without `memory` that
        can be given back the engine cannot be parked. `experts`: of a mixture. `num_devices`: those that work on every
        step, each of which a request pays for. `model` marks messages where several engines share a process. `vision`:
        the encoder of images; None: requests with images are refused."""
        self.scheduler = scheduler
        self.runner = runner
        self.guides = guides
        self.embeddings = embeddings or EmbedQueue(None)
        self.lora = lora
        self.is_parked = False
        self.wants_park = False  # as soon as it is idle
        self.outbox: list[FromEngine] = []  # taken by whoever drives the engine
        self.in_flight: deque[Step] = deque()  # the oldest first
        self.max_in_flight = max(scheduler.num_batches, 2 if runner.overlaps else 1)  # before the first is read
        self.last_commit_s = 0.0
        self.failed_steps = 0  # in a row
        self._model = model
        self._memory = memory
        self._vision = vision
        self._rebalancing = Rebalancing(experts)
        self.transfer = transfer
        self._work = work
        self._num_devices = num_devices
        self._speculation = speculation
        self._steps = 0
        self._launched = 0
        self._busy_s = 0.0
        self._read_tokens = 0
        self._received_tokens = 0
        self._fragmentation, self._looked_s = 0.0, 0.0

    @property
    def is_idle(self) -> bool:
        is_lending = self.transfer is not None and self.transfer.has_work
        has_work = self.scheduler.has_work or self.embeddings.has_work or self._rebalancing.is_busy
        return not (self.in_flight or has_work or is_lending)

    # -- requests

    def receive(self, messages: Sequence[ToEngine], now: float) -> None:
        """Take messages in. Also without any, requests go on whose adapter has been read or whose KV blocks have come
        meanwhile."""
        if self.transfer is not None:
            messages = [*messages, *self._exchange(self.transfer, now)]
        if self.lora is not None:
            messages = self.lora.receive(messages)
            self._tell_of_adapters()
        is_aborted = False
        for message in messages:
            match message:
                case Submit(request):
                    if self.transfer is None or not self.transfer.is_own(request.id):
                        self._received_tokens += len(request.prompt_ids)  # that the server has sent
                    if self.is_parked or self.wants_park:
                        self._refuse(request, _PARKED, EngineUnavailable.code)
                    else:
                        self._begin(request, now)
                case Abort(request_id):
                    self.embeddings.abort(request_id)
                    is_aborted |= self._abort(request_id)
                case Embed(request_id) if self.is_parked or self.wants_park:
                    self.outbox.append(Embedded(request_id, error=_PARKED, model=message.model))
                case Embed():
                    self.embeddings.add(message)
                case Park():
                    self.wants_park = True
                case Wake():
                    self._wake()
                case RebalanceExperts():
                    self._rebalance()
        if is_aborted and not self.scheduler.has_work:  # no step will report that the engine is idle now
            self._report([])
        if self.wants_park and self.is_idle:
            self._park()

    def _begin(self, request: Request, now: float) -> None:
        if request.guide is not None and self.guides is None:
            self._refuse(request, "this engine cannot keep an answer to a guide", UnsupportedParameter.code)
            return
        if request.thinking is not None and self.guides is None:
            self._refuse(request, "this engine cannot keep thoughts to a budget", UnsupportedParameter.code)
            return
        if request.adapter is not None and not self.scheduler.adapters.num_slots:
            self._refuse(request, "this engine runs no adapters", UnsupportedParameter.code)
            return
        if request.images and (reason := self._refusal_of(request)):
            self._refuse(request, reason, UnsupportedParameter.code)
            return
        is_guided = request.guide is not None or request.thinking is not None
        guide = self.guides.open(request) if is_guided and self.guides is not None else None
        sequence = self.scheduler.submit(request, now, guide)
        if self.transfer is not None and self.transfer.begin(sequence, now):
            self.scheduler.set_aside(sequence)

    def _refusal_of(self, request: Request) -> str | None:
        """Reason why the images of a request cannot be taken; None: they can."""
        room = self.scheduler.images.max_tokens
        if self._vision is None or not room:
            return "this engine takes no images"
        for number, image in enumerate(request.images, 1):
            if image.num_tokens > room:
                return f"image {number} has {image.num_tokens} tokens; this engine takes up to {room}"
            if problem := self._vision.problem(image):
                return f"image {number} is not what this model's encoder takes: {problem}"
        if not are_placed(request.images, request.prompt_ids):
            return "the images are not where the prompt has their tokens"
        return None

    def _abort(self, request_id: str) -> bool:
        if self.transfer is not None:
            self.transfer.abandon(request_id)
        return self.scheduler.abort(request_id)

    # -- KV blocks of other engines

    def _exchange(self, transfer: KvExchange, now: float) -> list[ToEngine]:
        """KV blocks that have come or are to go; messages of this engine to itself, about prompts that it computes for
        others."""
        had_work = transfer.has_work
        begun, aborted = transfer.advance(
            now,
            is_open=not (self.is_parked or self.wants_park),
            has_room=not self.scheduler.is_short,
            launched=self._launched,
            done=self._launched - (len(self.in_flight) if self.runner.overlaps else 0),
        )
        for sequence in transfer.ended:
            self.scheduler.bring_back(sequence)
        transfer.ended.clear()
        if transfer.costs:
            charges = [Charge(request_id, cost.device_s, cost.kv_block_s) for request_id, cost in transfer.costs]
            transfer.costs.clear()
            self._report([], charges=charges)
        elif had_work and not (transfer.has_work or self.scheduler.has_work):  # no step will report that it is idle now
            self._report([])
        return [*map(Submit, begun), *map(Abort, aborted)]

    def _without_own(
        self, transfer: KvExchange, events: list[TokenEvent], charges: list[Charge]
    ) -> tuple[list[TokenEvent], list[Charge]]:
        """Events for the server: all but those of prompts that are computed for others."""
        own = [event for event in events if transfer.is_own(event.request_id)]
        for charge in charges:
            transfer.charge(charge.request_id, charge.device_s, charge.kv_block_s)
        charges = [charge for charge in charges if not transfer.is_own(charge.request_id)]
        for event in own:
            if event.finish is not None:
                transfer.finished(event)
        mine = {event.request_id for event in own}
        return [event for event in events if event.request_id not in mine], charges

    def _refuse(self, request: Request, message: str, code: str) -> None:
        self._report([TokenEvent(request.id, finish=FinishReason.ERROR, error=message, error_code=code)])

    def _tell_of_adapters(self) -> None:
        assert self.lora is not None
        if failures := self.lora.take_failures():
            self._report(failures)
        self.outbox += self.lora.take_answers()

    # -- parking

    def _park(self) -> None:
        """Nothing runs and nothing waits: no sequence sees memory come or go."""
        self.wants_park = False
        if not self.is_parked:
            self._change_memory(True)
        else:
            self.outbox.append(ParkAnswer(True, model=self._model))

    def _wake(self) -> None:
        self.wants_park = False
        if self.is_parked:
            self._change_memory(False)
        else:
            self.outbox.append(ParkAnswer(False, model=self._model))

    def _change_memory(self, parks: bool) -> None:
        """An error that is no `PenstockError` ends the process: nobody knows then what the device still has."""
        if self._memory is None:
            told = "this engine cannot give its device's memory back: on a GPU start it with --parkable"
            self.outbox.append(ParkAnswer(False, code=UnsupportedTask.code, message=told, model=self._model))
            return
        try:
            change = self._memory.park() if parks else self._memory.wake()
        except PenstockError as error:
            answer = ParkAnswer(self.is_parked, code=error.code, message=error.message, model=self._model)
            self.outbox.append(answer)
            return
        self.is_parked = parks
        if self.lora is not None:
            self.lora.is_parked = parks
        if parks:
            self.scheduler.cache.clear()
            self.scheduler.images.clear()
            self._report([])
        self.outbox.append(ParkAnswer(parks, change, model=self._model))

    # -- experts

    def _rebalance(self) -> None:
        if self.is_parked or self.wants_park:
            answer: RebalanceAnswer | None = RebalanceAnswer(code=EngineUnavailable.code, message=_PARKED)
        else:
            answer = self._rebalancing.begin(self._model)
        if answer is not None:
            self.outbox.append(answer)

    # -- steps

    @property
    def may_launch(self) -> bool:
        """Whether a step may go out now. It may go behind an unread one if the device allows it and no sequence guesses
        what comes after its own."""
        if not self.in_flight:
            return True
        return len(self.in_flight) < self.max_in_flight and self._goes_ahead(self.in_flight[0])

    def _goes_ahead(self, previous: Step) -> bool:
        """Whether a step may go ahead: those with drafts in flight cannot, and others had better stay with them."""
        if self._speculation is None:
            return True
        if any(planned.ahead for planned in previous.plan.slices):
            return False
        try:
            return not self._speculation.wants(self.scheduler.soon_decoding)
        except Exception:
            self._stop_guessing()
            return True

    def launch(self, now: float) -> bool:
        """Plan the next step and give it to the device. False: there is none, or it failed."""
        if self._rebalancing.is_busy and (answer := self._rebalancing.step()) is not None:
            self.outbox.append(answer)
        is_ahead = bool(self.in_flight)
        plan = self.scheduler.plan(now, {} if is_ahead else self._drafts())
        if plan is None:
            return False
        try:
            handle = self.runner.submit(plan)
        except Exception:
            self._give_up(plan)
            return False
        self.in_flight.append(Step(plan, handle, now, is_ahead))
        self._launched += 1
        return True

    def _drafts(self) -> Drafts:
        """Drafts of what may come next, for sequences for which it pays to guess."""
        if self._speculation is None:
            return {}
        try:
            return self._speculation.drafts(self.scheduler.decoding)
        except Exception:
            self._stop_guessing()
            return {}

    def _stop_guessing(self) -> None:
        log.exception("drafts could not be made; the engine goes on without")
        self._speculation = None

    @property
    def is_writing(self) -> bool:
        """Blocks are on their way to disk, also while it is idle."""
        disk = self.scheduler.cache.disk
        return disk is not None and disk.is_writing

    def report_disk(self, now: float) -> None:
        """Say at the start what an earlier engine has left on disk."""
        cache = self.scheduler.cache
        if cache.disk is not None:
            cache.poll(now)
            self._report([])

    def wait_for_disk(self, timeout_s: float, now: float) -> None:
        """Take in what the disk has done, and give it more."""
        self.scheduler.cache.poll(now)
        if (disk := self.scheduler.cache.disk) is not None:
            disk.files.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """No step can be launched and none is in flight: wait for what requests wait for, their guides, the disk or
        other engines."""
        disk = self.scheduler.cache.disk
        if disk is not None and disk.is_reading:
            disk.files.wait(timeout_s)
        elif self.transfer is not None and self.transfer.has_work:
            self.transfer.wait(timeout_s)
        elif self.guides is not None and self.scheduler.has_work:
            self.guides.wait(timeout_s)

    def choose(self) -> None:
        """Choose the newest step's tokens, where that had to wait for those of the step before."""
        if self.guides is None or not self.in_flight:
            return
        try:
            self.in_flight[-1].handle.choose()
        except Exception:
            self._give_up(self.in_flight.pop().plan)

    def result(self) -> StepResult | None:
        """Wait for the oldest step. None: it failed, and whoever was in it is told."""
        try:
            return self.in_flight[0].handle.result()
        except Exception:
            failed = self.in_flight.popleft()
            self._give_up(failed.plan, [step.plan for step in self.in_flight])
            return None

    def commit(self, result: StepResult, now: float) -> StepReport:
        """Take the tokens of the oldest step, which ended now."""
        scheduler, speculation = self.scheduler, self._speculation
        plan, _, submitted_s, is_ahead = self.in_flight.popleft()
        cost_s = now - max(submitted_s, self.last_commit_s)
        self.last_commit_s = now
        self._steps += 1
        self.failed_steps = 0
        self._busy_s += cost_s
        if speculation is not None:
            speculation.observe(plan, result, cost_s, is_ahead=is_ahead)
        held_tokens = scheduler.cache.held_tokens  # before those who end give their blocks back
        events = scheduler.commit(plan, result, now)
        if self.guides is not None:
            self.guides.go()
        shares = split(plan.slices, events, cost_s, self._work)
        num_drafts = sum([len(planned.ahead) for planned in plan.slices]) if speculation is not None else 0
        if not num_drafts:
            num_tokens = shares.num_tokens + scheduler.images.work(plan.encodes)
            scheduler.cache.observe(num_tokens - shares.num_decodes, cost_s, shares.num_decodes, plan.copies)
            scheduler.budget.observe(num_tokens, shares.num_decodes, now - submitted_s)
        self._read_tokens += min(shares.context, held_tokens)
        if now - self._looked_s >= _LOOK_S:
            self._looked_s, self._fragmentation = now, scheduler.fragmentation
        devices = self._num_devices
        charges = [Charge(one.request_id, one.seconds * devices, one.num_blocks * cost_s) for one in shares.shares]
        figures = StepFigures(shares.num_tokens, len(plan.slices), num_drafts, cost_s, shares.price)
        return self._report(events, figures, charges)

    def _give_up(self, plan: StepPlan, behind: Sequence[StepPlan] = ()) -> None:
        """Ends the sequences of a failed step with an error; all others go on. `behind`: steps launched after it."""
        log.exception("a step with %d sequences and %d tokens failed", len(plan.slices), plan.num_tokens)
        self.failed_steps += 1
        if self.failed_steps >= _MAX_FAILED_STEPS:
            raise RuntimeError(f"{self.failed_steps} steps in a row failed")
        slices = list(plan.slices)
        if (states := self.scheduler.cache.states) is not None:
            # A snapshot of a state that this step has spoiled may have been taken and gone on from behind it.
            slices += [planned for later in behind for planned in later.slices]
            states.clear()
        ended = [s.request_id for s in slices if self._abort(s.request_id)]
        message = "the engine failed while running this request"
        self.scheduler.adapters.undo(plan)
        self.scheduler.cache.undo(plan.copies)
        self.scheduler.images.undo(plan.encodes)
        self._report([TokenEvent(request_id, finish=FinishReason.ERROR, error=message) for request_id in ended])

    def embedded(self, batch: EmbedBatch) -> None:
        """Answer for texts that were computed between two steps."""
        self._busy_s += batch.device_s
        self.outbox += batch.answers

    # -- what it says

    def _report(
        self, events: list[TokenEvent], step: StepFigures = _NO_STEP, charges: list[Charge] | None = None
    ) -> StepReport:
        charges = charges or []
        if self.transfer is not None:
            events, charges = self._without_own(self.transfer, events, charges)
        report = StepReport(events, self._measured(), step, self.cache_changes(), charges, self._model)
        self.outbox.append(report)
        return report

    def cache_changes(self) -> CacheChanges | None:
        """Routing blocks that the cache has taken in, moved or dropped since the last call."""
        routing = self.scheduler.cache.routing
        changes = routing.changes() if routing is not None else None
        return CacheChanges(*changes) if changes is not None else None

    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens + sum([step.prompt_tokens for step in self.in_flight]),
            kv_active_tokens=scheduler.cache.held_tokens,
            kv_fragmentation=self._fragmentation if scheduler.num_running else 0.0,
            budget_tokens=scheduler.budget.tokens,
            steps=self._steps,
        )

    def _measured(self) -> EngineMeasurements:
        counters, cache = self.scheduler.counters, self.scheduler.cache
        return EngineMeasurements(
            self.load(),
            EngineTotals(
                busy_s=self._busy_s,
                generated_tokens=counters.generated_tokens,
                received_tokens=self._received_tokens,
                preemptions=counters.preemptions,
                recomputed_tokens=counters.recomputed_tokens,
                read_tokens=self._read_tokens,
                forced_tokens=counters.forced_tokens,
                mask_wait_s=self.guides.waited_s if self.guides is not None else 0.0,
            ),
            PrefixCacheUse(
                prompt_tokens=counters.prompt_tokens,
                cached_tokens=counters.cached_tokens,
                loaded_tokens=cache.loaded_tokens,
                evictions=cache.pool.counters.evictions,
                cached_blocks=cache.pool.num_cached,
            ),
            SpeculationTotals(counters.drafted_tokens, counters.accepted_tokens),
            speeds=EngineSpeeds(kv_pull_tokens_per_s=self.transfer.pull_tokens_per_s if self.transfer else None),
            transfer=self.transfer.totals if self.transfer is not None else KvTransferTotals(),
            disk=_disk_use(cache),
        )


def _disk_use(cache: KVCache) -> DiskCacheUse:
    disk = cache.disk
    if disk is None:
        return _NO_DISK
    return DiskCacheUse(
        disk_blocks=len(disk),
        disk_bytes=len(disk) * disk.files.block_bytes,
        disk_loaded_tokens=disk.counters.loaded_blocks * cache.pool.block_size,
        disk_dropped_blocks=disk.counters.dropped_blocks,
        disk_late_blocks=disk.counters.late_blocks,
        disk_damaged_blocks=disk.files.num_damaged,
        disk_errors=disk.files.num_errors,
    )
