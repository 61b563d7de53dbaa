"""The real engine loop on a clock that its runner moves: what a simulated replica must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.request import Priority, Request
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.mailbox import Disconnected
from penstock.engine.messages import FromEngine, StepReport, Submit, ToEngine
from penstock.engine.step_log import shape_of
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import Sampled, StepHandle, StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from penstock.sim.profile import Profile
from penstock.workload.trace import BLOCK_TOKENS


class Asked(NamedTuple):
    at_s: float
    prompt_tokens: int
    output_tokens: int
    names: tuple[int, ...] = ()
    priority: Priority = Priority.NORMAL
    tenant: str = ""


class Seen(NamedTuple):
    first_s: float
    end_s: float
    cached_tokens: int


class _Clock:
    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class _Device:
    """It takes as long as the profile says: of one stage one step after the other, of several each has one."""

    def __init__(self, profile: Profile, clock: _Clock) -> None:
        self.overlaps = profile.overlaps or profile.stages > 1
        self._profile = profile
        self._clock = clock
        self._free_at = [0.0] * profile.stages

    def submit(self, plan: StepPlan) -> StepHandle:
        profile = self._profile
        seconds = profile.cost.seconds(shape_of(plan)) + profile.copying_s(plan.copies)
        end = self._clock.at
        for stage, free_at in enumerate(self._free_at):
            end = self._free_at[stage] = max(end, free_at) + seconds / profile.stages
        if not self.overlaps:
            self._clock.at = end  # it returns when it is done
        chosen = [Sampled([0]) if piece.sample is not None else None for piece in plan.slices]
        return _Running(StepResult(chosen), end, self._clock)


class _Running:
    def __init__(self, result: StepResult, end: float, clock: _Clock) -> None:
        self._result, self._end, self._clock = result, end, clock

    def result(self) -> StepResult:
        self._clock.at = self._end
        return self._result


class _Mail:
    def __init__(self, messages: list[tuple[float, ToEngine]], clock: _Clock) -> None:
        self._messages = messages
        self._clock = clock
        self.first: dict[str, tuple[float, int]] = {}
        self.seen: dict[str, Seen] = {}

    def receive(self, *, wait: bool) -> list[ToEngine]:
        if wait:
            if not self._messages:
                raise Disconnected
            self._clock.at = max(self._clock.at, self._messages[0][0])
        due = [message for at, message in self._messages if at <= self._clock.at]
        del self._messages[: len(due)]
        return due

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        for event in message.events:
            if event.timings is not None:
                self.first[event.request_id] = (self._clock.at, event.cached_tokens or 0)
            if event.finish is not None:
                first_s, cached = self.first[event.request_id]
                self.seen[event.request_id] = Seen(first_s, self._clock.at, cached)


def run_engine(profile: Profile, asked: Sequence[Asked]) -> tuple[dict[str, Seen], Scheduler]:
    cache = KVCache(
        profile.num_blocks,
        profile.block_tokens,
        routing_tokens=ROUTING_TOKENS,
        host_blocks=profile.host_blocks,
        copy_s=profile.copy_s,
    )
    budget = StepBudget(
        profile.chunk_tokens, target_s=profile.slo.tpot_s, floor=max(profile.block_tokens, profile.chunk_tokens // 8)
    )
    scheduler = Scheduler(
        cache,
        budget,
        max_num_seqs=profile.max_sequences,
        patience_s=profile.slo.patience_s,
        num_batches=profile.stages,
    )
    clock = _Clock()
    messages: list[tuple[float, ToEngine]] = [
        (
            one.at_s,
            Submit(Request(str(i), _tokens(i, one), one.output_tokens, priority=one.priority, tenant=one.tenant)),
        )
        for i, one in enumerate(asked)
    ]
    mail = _Mail(sorted(messages, key=lambda pair: pair[0]), clock)
    EngineLoop(Engine(scheduler, _Device(profile, clock)), mail, clock).run()
    return mail.seen, scheduler


def _tokens(number: int, asked: Asked) -> list[int]:
    """Real ones: those of a name the same wherever it stands, the rest nobody else's."""
    named = [name * BLOCK_TOKENS + i for name in asked.names for i in range(BLOCK_TOKENS)][: asked.prompt_tokens]
    own = (1 << 31) + number * 100_000
    return named + [own + i for i in range(asked.prompt_tokens - len(named))]
