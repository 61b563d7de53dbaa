"""Replicas with prefix caches behind the real admission and router, on a manual clock.

A replica computes prompts in the order they come, a step's budget at a time, beside one token for each sequence that
decodes; it keeps the blocks of past prompts, the longest unused evicted first, and tells what it stored and removed a
little later, as the real ones do. What sequences hold cannot be evicted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Admit, Decision, Shed
from penstock.core.replica import ReplicaSnapshot
from penstock.core.request import Priority
from penstock.router.learning import OutputLengths
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from penstock.router.strategies import RoutingSettings
from penstock.workload.trace import BLOCK_TOKENS, Arrival

STEP_TOKENS, MAX_SEQUENCES = 2048, 128
STEP_S, PREFILL_TOKEN_S, DECODE_S = 0.012, 0.00004, 0.0001  # about 20,000 prompt tokens a second
SNAPSHOT_S, EVENTS_S = 0.25, 0.05


@dataclass(eq=False)
class Job:
    request: EdgeRequest
    output: int
    asked_at: float
    left: int = 0  # prompt tokens still to compute
    hit: int = 0  # prompt tokens that were there
    replica: str = ""
    ttft_s: float | None = None
    is_shed: bool = False


class Cache:
    """Blocks by hash, the longest unused first; a count of sequences that hold each."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: dict[int, int] = {}

    def hit(self, hashes: Sequence[int]) -> int:
        return next((i for i, block in enumerate(hashes) if block not in self.blocks), len(hashes))

    def hold(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """What was stored for it, and what had to go."""
        stored = [block for block in hashes if block not in self.blocks]
        for block in reversed(hashes):  # a chain's end is evicted before its beginning
            self.blocks[block] = self.blocks.pop(block, 0) + 1
        excess = len(self.blocks) - self.num_blocks
        free = (block for block, holders in self.blocks.items() if not holders)
        removed = list(itertools.islice(free, max(0, excess)))
        for block in removed:
            del self.blocks[block]
        return stored, removed

    def release(self, hashes: Sequence[int]) -> None:
        for block in hashes:
            self.blocks[block] -= 1


@dataclass(eq=False)
class SimReplica:
    sim: Simulation
    name: str
    kv_tokens: int
    cache: Cache
    publishes: bool = True
    waiting: deque[Job] = field(default_factory=deque)
    decoding: int = 0
    kv_active: int = 0
    steps: int = 0
    is_busy: bool = False
    is_gone: bool = False
    computed: int = 0  # prompt tokens, in all

    def take(self, job: Job) -> None:
        job.left = job.request.prompt_tokens
        self.kv_active += job.left
        self.waiting.append(job)
        if not self.is_busy:
            self._step()

    def _step(self) -> None:
        budget, done = STEP_TOKENS, list[Job]()
        while self.waiting and budget:
            job = self.waiting[0]
            if job.left == job.request.prompt_tokens:  # its first chunk: now it is looked up what is there
                job.hit = job.request.tokens_of(self.cache.hit(job.request.hashes))
                job.left -= job.hit
            count = min(job.left, budget)
            job.left -= count
            budget -= count
            if job.left == 0:
                done.append(self.waiting.popleft())
                self._publish(*self.cache.hold(job.request.hashes))
        self.is_busy = budget < STEP_TOKENS
        if not self.is_busy:
            return
        self.computed += STEP_TOKENS - budget
        seconds = STEP_S + DECODE_S * self.decoding + PREFILL_TOKEN_S * (STEP_TOKENS - budget)
        self.sim.after(seconds, lambda: self._commit(done))

    def _commit(self, done: Iterable[Job]) -> None:
        if self.is_gone:
            return
        self.steps += 1
        for job in done:
            self.decoding += 1
            self.sim.first_token(job)
            seconds = job.output * (STEP_S + DECODE_S * self.decoding)
            self.sim.after(seconds, lambda job=job: self._end(job))  # type: ignore[misc]
        self._step()

    def _end(self, job: Job) -> None:
        if self.is_gone:
            return
        self.decoding -= 1
        self.kv_active -= job.request.prompt_tokens
        self.cache.release(job.request.hashes)
        self.sim.done(job)

    def _publish(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        if self.publishes:
            self.sim.after(EVENTS_S, lambda: self.sim.index.stored(self.name, stored))
            self.sim.after(EVENTS_S, lambda: self.sim.index.removed(self.name, removed))

    def snapshot(self) -> ReplicaSnapshot:
        speed = STEP_TOKENS / (STEP_S + PREFILL_TOKEN_S * STEP_TOKENS)
        return ReplicaSnapshot(
            id=self.name, models=("m",), taken_at=self.sim.now, max_sequences=MAX_SEQUENCES, step_tokens=STEP_TOKENS,
            kv_capacity_tokens=self.kv_tokens, prefill_tokens_per_s=speed,
            decode_tokens_per_s=MAX_SEQUENCES / (STEP_S + DECODE_S * MAX_SEQUENCES), mean_output_tokens=300,
            running=self.decoding, waiting=len(self.waiting), prefill_tokens=sum(job.left for job in self.waiting),
            kv_active_tokens=self.kv_active, steps=self.steps,
        )  # fmt: skip


class Simulation:
    def __init__(
        self, routing: RoutingSettings | None = None, num_replicas: int = 4, kv_tokens: int = 1_000_000,
        block_tokens: int = BLOCK_TOKENS, publishes: bool = True,
    ) -> None:  # fmt: skip
        self.now = 0.0
        self.index = PrefixIndex()
        self.admission = Admission(Router((routing or RoutingSettings()).build(self.index), index=self.index))
        self.lengths = OutputLengths()
        self.jobs: list[Job] = []
        self._block_tokens = block_tokens
        self._by_id: dict[str, Job] = {}
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        names = [f"r{i}" for i in range(num_replicas)]
        self.replicas = {
            name: SimReplica(self, name, kv_tokens, Cache(kv_tokens // block_tokens), publishes) for name in names
        }
        if publishes:
            for name in names:
                self.index.reset(name, ())
        self._measure()

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if self.admission.num_waiting("m"):
                for decision in self.admission.poll(self.now):
                    self._take(decision)
        self.now = until

    def lose(self, name: str) -> None:
        """A replica dies with what it holds; what it was computing is lost to its clients."""
        self.replicas.pop(name).is_gone = True
        self.admission.replica_gone(name)
        self.index.forget(name)

    def ask(
        self, at: float, prompt_tokens: int, output: int, blocks: Sequence[int], *, session: str | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> Job:  # fmt: skip
        number = len(self.jobs)
        request = EdgeRequest(
            f"q{number}", "m", prompt_tokens, max(output, 1024), "", priority, session,
            draw=number * 0.7548776662 % 1.0, hashes=tuple(blocks), block_tokens=self._block_tokens,
        )  # fmt: skip
        job = Job(request, output, at)
        self.jobs.append(job)
        heapq.heappush(self._events, (at, next(self._order), lambda: self._submit(job)))
        return job

    def ask_all(self, rows: Iterable[Arrival], speed: float = 1.0) -> float:
        """A whole trace, so many times as fast; when the last one comes."""
        last = 0.0
        for row in rows:
            last = row.at_s / speed
            self.ask(last, row.prompt_tokens, row.output_tokens, row.whole_blocks, session=row.session)
        return last

    # -- inside

    def _measure(self) -> None:
        for replica in self.replicas.values():
            self.admission.replica_changed(replica.snapshot())
        self.after(SNAPSHOT_S, self._measure)

    def _submit(self, job: Job) -> None:
        expected = self.lengths.expected("", "m", job.request.max_tokens)
        job.request = replace(job.request, expected_output=expected)
        self._by_id[job.request.id] = job
        self._take(self.admission.submit(job.request, self.now))

    def _take(self, decision: Decision) -> None:
        job = self._by_id[decision.request.id]
        if isinstance(decision, Admit):
            job.replica = decision.replica_id
            self.replicas[decision.replica_id].take(job)
        elif isinstance(decision, Shed):
            job.is_shed = True

    def first_token(self, job: Job) -> None:
        job.ttft_s = self.now - job.asked_at
        self.admission.started(job.request.id, self.now)

    def done(self, job: Job) -> None:
        self.lengths.learn("", "m", job.output)
        self.admission.finished(job.request.id, self.now, Used(job.request.prompt_tokens, job.output))
