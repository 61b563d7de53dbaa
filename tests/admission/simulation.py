"""Replicas that batch in steps, and clients that come, wait, are refused and come back: admission's drills in no time.

The real admission and router on a manual clock. A replica's step takes `STEP_S` and more for every token in it; it
prefills one budget a step, beside one token for each sequence that decodes, as the engine does.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Admit, Decision, Queued, Shed
from penstock.core.replica import ReplicaSnapshot
from penstock.core.request import Priority
from penstock.router.request import EdgeRequest
from tests.snapshots import snapshot

STEP_S, PREFILL_TOKEN_S, DECODE_S = 0.015, 0.00002, 0.0002
STEP_TOKENS, MAX_SEQUENCES, KV_TOKENS = 2048, 32, 32_000
SNAPSHOT_S = 0.25


@dataclass(eq=False)
class Job:
    """One request of a client, over all its tries."""

    request: EdgeRequest
    output: int
    first_try: float
    asked: float = 0.0
    told: float | None = None  # when it was told to come back
    tries: int = 0
    left: int = 0  # prompt tokens still to compute
    made: int = 0
    ttft: float | None = None  # from its last try
    outcomes: list[str] = field(default_factory=list)


class Replica:
    def __init__(self, sim: "Simulation", name: str) -> None:
        self.sim, self.name = sim, name
        self.jobs: list[Job] = []
        self.steps = 0
        self.is_busy = False

    def take(self, job: Job) -> None:
        job.left, job.made = job.request.prompt_tokens, 0
        self.jobs.append(job)
        if not self.is_busy:
            self._step()

    def _step(self) -> None:
        batch = self.jobs[:MAX_SEQUENCES]
        self.is_busy = bool(batch)
        if not batch:
            return
        budget, plan, decodes = STEP_TOKENS, [], 0
        for job in batch:
            decodes += job.left == 0
            count = min(job.left, budget)
            budget -= count
            plan.append((job, count))
        seconds = STEP_S + PREFILL_TOKEN_S * (STEP_TOKENS - budget) + DECODE_S * decodes
        self.sim.after(seconds, lambda: self._commit(plan))

    def _commit(self, plan: list[tuple[Job, int]]) -> None:
        self.steps += 1
        for job, count in plan:
            job.left -= count
            if job.left == 0:
                job.made += 1
                if job.made == 1:
                    self.sim.first_token(job)
                if job.made >= job.output:
                    self.jobs.remove(job)
                    self.sim.done(job)
        self._step()

    def snapshot(self) -> ReplicaSnapshot:
        batch = self.jobs[:MAX_SEQUENCES]
        return snapshot(
            id=self.name,
            models=("m",),
            taken_at=self.sim.now,
            max_num_seqs=MAX_SEQUENCES,
            chunk_tokens=STEP_TOKENS,
            kv_capacity_tokens=KV_TOKENS,
            prefill_tokens_per_s=STEP_TOKENS / (STEP_S + PREFILL_TOKEN_S * STEP_TOKENS),
            decode_tokens_per_s=MAX_SEQUENCES / (STEP_S + DECODE_S * MAX_SEQUENCES),
            mean_output_tokens=100,
            num_running=len(batch),
            num_waiting=len(self.jobs) - len(batch),
            queued_tokens=sum(job.left for job in self.jobs),
            kv_active_tokens=sum(job.request.prompt_tokens - job.left + job.made for job in self.jobs),
            steps=self.steps,
        )


class Simulation:
    def __init__(self, admission: Admission, num_replicas: int = 2, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.admission = admission
        self.replicas = {f"r{i}": Replica(self, f"r{i}") for i in range(num_replicas)}
        self.jobs: dict[str, Job] = {}
        self.finished: list[Job] = []
        self.refused: list[tuple[Job, Shed]] = []
        self.comes_back = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids: Iterator[int] = itertools.count(1)
        self._measure()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), action))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            for decision in self.admission.poll(self.now):
                self._take(decision)
        self.now = until

    def _measure(self) -> None:
        for replica in self.replicas.values():
            self.admission.replica_changed(replica.snapshot())
        self.after(SNAPSHOT_S, self._measure)

    def arrivals(
        self,
        rate: float,
        until: float,
        *,
        tenant: str = "",
        priority: Priority = Priority.NORMAL,
        since: float = 0.0,
        prompt: tuple[int, int] = (100, 700),
        output: tuple[int, int] = (50, 150),
    ) -> None:
        """Poisson; the output limit is the most that outputs come to."""
        at, random01 = since, self.random
        while (at := at + random01.expovariate(rate)) < until:
            name = f"q{next(self._ids)}"
            request = EdgeRequest(
                name,
                "m",
                random01.randint(*prompt),
                output[1],
                tenant,
                priority,
                random01=random01.random(),
                fingerprint=random01.getrandbits(60) | 1,
            )
            job = Job(request, random01.randint(*output), at)
            event: tuple[float, int, Callable[[], None]] = (at, next(self._ids), partial(self._ask, job))
            heapq.heappush(self._events, event)

    def _ask(self, job: Job) -> None:
        job.tries += 1
        job.asked = self.now
        self.jobs[job.request.id] = job
        self._take(self.admission.submit(job.request, self.now))

    def _take(self, decision: Decision) -> None:
        job = self.jobs[decision.request.id]
        job.outcomes.append(type(decision).__name__)
        match decision:
            case Admit(replica_id=name):
                self.replicas[name].take(job)
            case Shed(retry_after_s=retry_s):
                self.refused.append((job, decision))
                del self.jobs[job.request.id]
                if self.comes_back and retry_s is not None:
                    job.told = self.now + retry_s
                    self.after(retry_s, lambda: self._ask(job))
            case Queued():
                pass

    def first_token(self, job: Job) -> None:
        job.ttft = self.now - job.asked
        self.admission.started(job.request.id, self.now)

    def done(self, job: Job) -> None:
        self.finished.append(job)
        self.admission.finished(job.request.id, self.now, Used(job.request.prompt_tokens, job.made))


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
