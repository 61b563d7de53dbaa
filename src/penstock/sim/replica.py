"""One replica: the real engine in simulated time, with a device that computes nothing and takes as long as it should.

As in the engine's loop, mail is read between steps, and on a device that overlaps the next step is launched before the
one that runs is read. Steps of which the scheduler says that they decide nothing are taken in one commit; mail that
comes in their midst ends them after the step that is running then.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol, cast

from msgspec.structs import replace

from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.measurements import EngineLoad, EngineMeasurements, EngineSpeeds, ServingLimits
from penstock.core.request import Request, TokenEvent
from penstock.core.settings import Role
from penstock.engine.engine import Engine, Step
from penstock.engine.messages import Abort, CacheChanges, StepReport, Submit, ToEngine
from penstock.engine.speed import StepSpeed
from penstock.engine.step_log import StepShape
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from penstock.sim.device import TOKEN, SimRunner, SimStep, shape_in
from penstock.sim.events import Events
from penstock.sim.network import SimFabric, SimNetwork
from penstock.sim.news import CacheNews
from penstock.sim.pipeline import Pipeline
from penstock.sim.profile import Profile
from penstock.sim.sim_prompts import SimSequence, TokenRun
from penstock.sim.steady_run import SteadyRun
from penstock.transfer.exchange import KvExchange

_POLL_S = 0.1  # how often an engine without steps looks after KV transfers, as the real loop does
_SILENCE_S = 10.0  # of another engine, after which a pull is given up
_MAX_STEADY = 512  # steps at once: so that what nobody interrupts need not be reckoned far ahead


class Listener(Protocol):
    def token(self, replica: SimReplica, event: TokenEvent) -> None:
        """The first token of a request, or its last."""


class SimReplica:
    def __init__(
        self,
        name: str,
        profile: Profile,
        events: Events,
        listener: Listener,
        *,
        takes_many: bool = True,
        role: Role = "both",
        fabric: SimFabric | None = None,
    ) -> None:
        """A replica with a `fabric` pulls KV blocks from others on it, and they from it; its name is its address."""
        self.name = name
        self.role: Role = role
        self.kv_pull_tokens_per_s = fabric.link.gb_s * 1e9 / profile.kv_token_bytes if fabric is not None else None
        self.profile = profile
        self.slowdown = 1.0  # a sick device takes so many times as long
        self.work_s = 0.0  # what was computed, in seconds of a device that is never idle
        self.busy_s = 0.0
        self.steps = 0
        self._events = events
        self._listener = listener
        self._fabric = fabric
        self._network: SimNetwork | None = None
        self._is_polling = False
        # What each step copies is part of its time; in a pipeline the next one begins before it ends.
        self._takes_many = takes_many and not profile.host_blocks and profile.stages == 1
        self._is_hung = False
        self._past_preemptions = 0
        self._limits = ServingLimits(
            max_open=2 * profile.max_sequences,
            max_num_seqs=profile.max_sequences,
            chunk_tokens=profile.chunk_tokens,
            max_model_len=min(profile.max_context_tokens, profile.kv_tokens),
            block_size=profile.block_tokens,
            kv_capacity_tokens=profile.kv_tokens,
        )
        self._begin()

    def _begin(self) -> None:
        """A process with an empty cache."""
        profile = self.profile
        self.cache = KVCache(
            profile.num_blocks,
            profile.block_tokens,
            routing_tokens=ROUTING_TOKENS,
            host_blocks=profile.host_blocks,
            copy_s=profile.copy_s,
        )
        floor = max(profile.block_tokens, profile.chunk_tokens // 8)
        budget = StepBudget(profile.chunk_tokens, target_s=profile.slo.tpot_s, floor=floor)
        self.scheduler = Scheduler(
            self.cache,
            budget,
            max_num_seqs=profile.max_sequences,
            patience_s=profile.slo.patience_s,
            make_sequence=SimSequence,
            num_batches=profile.stages,
        )
        runner = SimRunner(profile.overlaps or profile.stages > 1)
        self.transfer: KvExchange | None = None
        if self._fabric is not None:
            self._network = SimNetwork(self._fabric, self.name, profile.block_bytes, self._wake)
            self.transfer = KvExchange(self.cache, self._network, timeout_s=_SILENCE_S)
        self._engine = Engine(self.scheduler, runner, transfer=self.transfer, num_devices=profile.devices)
        self._pipeline = Pipeline(profile.stages) if profile.stages > 1 else None
        self._ends_s: deque[float] = deque()  # of steps in the pipeline
        self.speed = StepSpeed()
        self.num_open = 0
        self._sent_tokens = self._received_tokens = 0  # of all prompts
        self._runs: dict[str, TokenRun] = {}
        self._mail: list[ToEngine] = []
        self._steady: SteadyRun | None = None
        self._turn = 0  # of the device: what was foretold of another one no longer comes
        self._load = EngineLoad()  # as the engine last said, after a step
        self._told_tokens = 0  # of all prompts, likewise
        self.news = CacheNews()

    # -- what is sent

    def submit(self, request: Request) -> None:
        self.num_open += 1
        self._sent_tokens += len(request.prompt_ids)
        self._runs[request.id] = cast(TokenRun, request.prompt_ids)
        self._mail.append(Submit(request))
        self._wake()

    def abort(self, request_id: str) -> None:
        self.num_open -= 1
        del self._runs[request_id]
        self._mail.append(Abort(request_id))
        self._wake()

    # -- what is done to it

    def hang(self) -> None:
        """Its device stands still, and its process goes on reporting."""
        if self._steady is not None:
            self._steady.keep(self._num_steady_done())
            self._end_steady()
        self._turn += 1
        self._is_hung = True

    def leave_network(self) -> None:
        """Peers that pull from it, or lend to it, hear that it is gone."""
        if self._network is not None:
            self._network.close()

    def restart(self) -> None:
        """Starts the replica again; whatever it had is gone."""
        turn = self._turn
        self.leave_network()
        self._past_preemptions = self.preemptions
        self._is_hung = False
        self._begin()
        self._turn = turn + 1

    @property
    def preemptions(self) -> int:
        return self._past_preemptions + self.scheduler.counters.preemptions

    # -- what it says

    def measured(self) -> EngineMeasurements:
        profile, load, speed = self.profile, self._load, self.speed
        steps, growth = self.steps, 0
        if self._steady is not None:
            done = self._num_steady_done()
            steps, growth = steps + done, done * load.num_running
        return EngineMeasurements(
            replace(
                load,
                num_open=self.num_open,
                queued_tokens=load.queued_tokens + self._sent_tokens - self._told_tokens,
                kv_active_tokens=load.kv_active_tokens + growth,
                steps=steps,
            ),
            limits=self._limits,
            speeds=EngineSpeeds(
                speed.prefill_tokens_per_s,
                speed.decode_step_s,
                profile.host_tokens_per_s if profile.host_blocks else None,
                self.kv_pull_tokens_per_s,
            ),
        )

    @property
    def queued_tokens(self) -> int:
        """The tokens of prompts that are not computed yet: right now, as nobody outside can know."""
        under_way = sum(shape_in(step).prefill_tokens for step in self._engine.in_flight)
        return self.scheduler.queued_tokens + self._sent_tokens - self._received_tokens + under_way

    @property
    def context_tokens(self) -> int:
        """The tokens of all requests that are open, prompts and what was generated so far."""
        return sum(map(len, self._runs.values()))

    def has(self, request_id: str) -> bool:
        """Whether it has arrived."""
        return request_id in self._runs

    def num_generated(self, request_id: str) -> int:
        """Tokens of its output so far, those made elsewhere included."""
        run = self._runs[request_id]
        return len(run) - run.prompt_len + self._num_steady_done()

    # -- the loop

    def _wake(self) -> None:
        if self._is_hung:
            return
        if self._steady is not None:
            if self._steady.keep(self._num_steady_done() + 1):
                self._turn += 1
                self._events.at(self._steady.end_s, self._steady_over, self._turn)
        elif not self._engine.in_flight:
            self._fill()

    def _read_mail(self) -> None:
        self._engine.receive(self._mail, self._events.now)
        self._mail.clear()
        self._received_tokens = self._sent_tokens
        self._read_outbox()

    def _fill(self) -> None:
        """Launch as far ahead as the device allows."""
        if self._mail or self.transfer is not None:
            self._read_mail()
        engine, now = self._engine, self._events.now
        if self._takes_many and len(engine.in_flight) == int(self.profile.overlaps) and self._begin_steady():
            return
        while engine.may_launch and engine.launch(now):
            if self._pipeline is not None:
                self._ends_s.append(self._pipeline.end_s(now, self._seconds(engine.in_flight[-1])))
        if engine.in_flight:
            self._turn += 1
            end_s = self._ends_s[0] if self._ends_s else now + self._seconds(engine.in_flight[0])
            self._events.at(end_s, self._step_over, self._turn)
        else:
            self._note_load()
            self._poll_later()

    def _poll_later(self) -> None:
        if self.transfer is not None and self.transfer.has_work and not self._is_polling:
            self._is_polling = True
            self._events.after(_POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        self._wake()

    def _seconds(self, step: Step) -> float:
        profile = self.profile
        return (profile.cost.seconds(shape_in(step)) + profile.copying_s(step.plan.copies)) * self.slowdown

    def _step_over(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._ends_s:
            self._ends_s.popleft()
        if not self.profile.overlaps:  # the loop looks for mail when a step is done, and then at the step
            self._read_mail()
        step = self._engine.in_flight[0]
        report = self._engine.commit(step.handle.result(), self._events.now)
        self.steps += 1
        self.busy_s += report.step.cost_s
        self.work_s += self.profile.work_s(shape_in(step))
        self.speed.observe(report.step)
        self._read_outbox()
        self._fill()

    def _read_outbox(self) -> None:
        reports, self._engine.outbox = cast(list[StepReport], self._engine.outbox), []
        for report in reports:
            self._note(report.measured.load, report.cache)
            for event in report.events:
                if event.finish is not None:
                    self.num_open -= 1
                    del self._runs[event.request_id]
                if event.finish is not None or event.timings is not None:
                    self._listener.token(self, event)

    def _note_load(self) -> None:
        self._note(self._engine.load(), self._engine.cache_changes())

    def _note(self, load: EngineLoad, changes: CacheChanges | None) -> None:
        self._load = load
        self._told_tokens = self._received_tokens
        if changes is not None:
            self.news.add(changes)

    # -- many steps at once

    def _num_steady_done(self) -> int:
        return self._steady.num_done(self._events.now) if self._steady is not None else 0

    def _begin_steady(self) -> bool:
        if self.transfer is not None and self.transfer.has_work:
            return False  # which is looked after between steps
        steps = min(self.scheduler.steady_steps, _MAX_STEADY)
        if steps < 2:
            return False
        running = self.scheduler.num_running
        shape = StepShape(0, 0, running, sum(map(len, self._runs.values())))  # nobody waits: all that are here run
        if self._engine.in_flight:
            shape = shape_in(self._engine.in_flight[0])
        if shape.prefill_tokens or shape.decodes != running:
            return False
        seconds = self.profile.cost.decode_seconds(shape.decodes, shape.decode_context, steps)
        if self.slowdown != 1.0:
            seconds = [each * self.slowdown for each in seconds]
        self._steady = SteadyRun(shape, seconds, self._events.now)
        self._turn += 1
        self._events.at(self._steady.end_s, self._steady_over, self._turn)
        return True

    def _steady_over(self, turn: int) -> None:
        if turn == self._turn:
            self._end_steady()
            self._note_load()
            self._fill()

    def _end_steady(self) -> None:
        """Take what is left of the steps under way."""
        run, self._steady = self._steady, None
        if not run:
            return
        submitted_s = None
        in_flight = self._engine.in_flight
        if in_flight:  # the first of them; after the last one its like is in flight
            first = in_flight.popleft()
            submitted_s = first.submitted_s
            plan = StepPlan([replace(piece, start=piece.start + len(run)) for piece in first.plan.slices])
            in_flight.append(Step(plan, SimStep(plan, run.following), run.last_begin_s, first.is_ahead))
        self.scheduler.take_steady(len(run), TOKEN)
        decodes = run.following.decodes
        for wait_s in run.waits(submitted_s):
            self.scheduler.budget.observe(decodes, decodes, wait_s)
        costs = run.costs()
        self.speed.decoded(costs)
        self.steps += len(run)
        self.busy_s += sum(costs)
        self.work_s += self.profile.work_s(run.sum)
        self._engine.last_commit_s = run.end_s
