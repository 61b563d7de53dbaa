"""Everybody at the other end of an engine in process: who asks what when, who goes away, and what each was answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.core.measurements import EngineMeasurements
from penstock.core.model_config import VisionConfig
from penstock.core.request import FinishReason, Request, TokenLogprobs
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import Abort, FromEngine, RebalanceAnswer, StepReport, Stop, Submit, ToEngine
from penstock.engine.ports import Guides
from penstock.kv.cache import KVCache
from penstock.kv.host import HostBlocks
from penstock.kv.states import StateSlots
from penstock.runner.assemble import Assembly
from penstock.sched.budget import StepBudget
from penstock.sched.images import ImageSlots
from penstock.sched.lora import AdapterSlots
from penstock.sched.scheduler import Scheduler
from penstock.sched.speculation.speculation import Speculation

MAX_IDLE_TURNS = 1000  # of the engine's loop, without a step
TICK_S = 0.002


class TickingClock:
    """Time that passes by a fixed step whenever somebody looks at it: a scheduler that ranks by waiting time plans the
    same steps in every run, however fast the machine is."""

    def __init__(self) -> None:
        self._ticks = 0

    def now(self) -> float:
        self._ticks += 1
        return self._ticks * TICK_S


@dataclass
class Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None


Script = Callable[["Clients"], Iterator[list[ToEngine]]]  # what is said before each step; it may look at the clients


class Clients:
    """The engine's mailbox. When the script is over and all is answered, the engine is told to stop."""

    def __init__(self, script: Script) -> None:
        self._turns = script(self)
        self.open: dict[str, Answer] = {}
        self.finished: dict[str, Answer] = {}
        self.num_aborted = 0
        self.rebalanced: list[RebalanceAnswer] = []
        self.measured = EngineMeasurements()
        self._idle_turns = 0

    def receive(self, *, wait: bool) -> list[ToEngine]:
        self._idle_turns += 1
        assert self._idle_turns < MAX_IDLE_TURNS, f"the engine does nothing, and {len(self.open)} wait for it"
        messages = next(self._turns, None)
        if messages is None:
            return [Stop()] if wait else []
        for message in messages:
            match message:
                case Submit(request):
                    self.open[request.id] = Answer(request)
                case Abort(request_id):
                    del self.open[request_id]
                    self.num_aborted += 1
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, RebalanceAnswer):
            self.rebalanced.append(message)
            return
        assert isinstance(message, StepReport)
        self.measured = message.measured
        self._idle_turns = 0
        for event in message.events:
            assert event.error is None, event.error
            answer = self.open[event.request_id]
            answer.token_ids += event.token_ids
            answer.logprobs += event.logprobs or []
            answer.cached_tokens = event.cached_tokens or answer.cached_tokens
            if event.finish is not None:
                answer.finish = event.finish
                self.finished[event.request_id] = self.open.pop(event.request_id)


def one_after_the_other(requests: Iterable[Request], *, apart: int) -> Script:
    """A request before every step that is a multiple of `apart`; all at once if that is 0."""

    def script(_: Clients) -> Iterator[list[ToEngine]]:
        if apart == 0:
            yield [Submit(request) for request in requests]
            return
        for request in requests:
            yield [Submit(request)]
            yield from ([] for _ in range(apart - 1))

    return script


def serve(
    assembly: Assembly,
    clients: Clients,
    *,
    num_blocks: int,
    speculate: Callable[[KVCache], Speculation] | None = None,
    guides: Guides | None = None,
    vision: VisionConfig | None = None,
) -> None:
    """The engine's own loop over the assembled runner, with so many of its blocks, until all is answered. What is on
    the host is always worth fetching. `vision`: of a model that is sent images."""
    assert num_blocks <= assembly.size.num_blocks
    num_states, num_snapshots = assembly.limits.max_num_seqs, assembly.limits.state_snapshots
    states = StateSlots(num_states, num_snapshots, min_tokens=4) if assembly.state_bytes else None
    cache = KVCache(num_blocks, assembly.limits.block_size, states=states)
    if assembly.size.host_blocks:  # they come after all of the device's, whether those are used or not
        cache.pool.host = HostBlocks(
            assembly.size.host_blocks, assembly.size.num_blocks, block_size=assembly.limits.block_size
        )
    budget = StepBudget(assembly.limits.chunk_tokens, target_s=None, floor=assembly.limits.block_size)
    slots = AdapterSlots(assembly.adapters.num_slots if assembly.adapters is not None else 0)
    scheduler = Scheduler(
        cache,
        budget,
        max_num_seqs=assembly.limits.max_num_seqs,
        adapters=slots,
        num_batches=assembly.parallelism.pp,
        images=ImageSlots(assembly.limits.image_tokens, assembly.limits.step_image_tokens),
    )
    speculation = speculate(cache) if speculate is not None else None
    engine = Engine(
        scheduler, assembly.runner, guides=guides, speculation=speculation, experts=assembly.experts, vision=vision
    )
    EngineLoop(engine, clients, TickingClock()).run()
    if (images := getattr(assembly.rank_runner, "_images", None)) is not None:
        images._forget([*images._places])  # another engine over the same runner will not know of them
    assert not clients.open
    assert not scheduler.has_work
    assert cache.pool.num_free == num_blocks, "a block is still held"
    assert not cache._pending, "a block is still announced"
    assert cache.states is None or cache.states.num_free == num_states, "a recurrent state is still held"
