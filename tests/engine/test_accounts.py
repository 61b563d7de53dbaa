"""What requests are charged is what the engine worked, whatever happens to them."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.request import Cost, Priority, Request, TokenEvent
from penstock.core.sampling import SamplingParams
from penstock.engine.accounts import Accounts, Meter
from penstock.engine.engine import Engine
from penstock.engine.fake import FakeRunner
from penstock.engine.loop import EngineLoop
from penstock.engine.messages import Abort, FromEngine, StepReport, Stop, Submit, ToEngine
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.cost import Work
from penstock.sched.plan import StepHandle, StepPlan
from penstock.sched.scheduler import Scheduler
from tests.engine.expecting import engine, read
from tests.examples import examples
from tests.waiting import eventually_async

WORK = Work(token=10.0, choice=2.0, read=0.05, pair=0.001)
BLOCK = 4


@dataclass
class StepClock:
    """Stands still but for the steps: each takes as long as the dice say."""

    now_s: float = 0.0

    def now(self) -> float:
        return self.now_s


@dataclass
class TimedRunner:
    """A device with one step at a time: the result of a step is there when it has taken its time."""

    runner: FakeRunner
    clock: StepClock
    dice: random.Random

    @property
    def overlaps(self) -> bool:
        return self.runner.overlaps

    def submit(self, plan: StepPlan) -> StepHandle:
        handle, clock = self.runner.submit(plan), self.clock
        seconds = self.dice.uniform(1e-3, 1e-1)

        class Timed:
            def result(self):  # type: ignore[no-untyped-def]
                clock.now_s += seconds
                return handle.result()

        return Timed()


@dataclass
class Office:
    """The loop's mailbox and, at its other end, a server that keeps accounts and gives up now and then."""

    requests: list[Request]
    dice: random.Random
    abort_rate: float
    meters: dict[str, Meter] = field(default_factory=dict)
    accounts: Accounts = field(default_factory=Accounts)
    open_ids: set[str] = field(default_factory=set)
    events: list[TokenEvent] = field(default_factory=list)
    last: StepReport | None = None

    def receive(self, *, wait: bool) -> list[ToEngine]:
        mail: list[ToEngine] = []
        for _ in range(min(len(self.requests), self.dice.randint(0, 3) or wait)):
            request = self.requests.pop()
            self.meters[request.id] = Meter()
            self.accounts.open(request, self.meters[request.id])
            self.open_ids.add(request.id)
            mail.append(Submit(request))
        for request_id in sorted(self.open_ids):
            if self.dice.random() < self.abort_rate:
                self.open_ids.discard(request_id)
                self.accounts.close(request_id)
                mail.append(Abort(request_id))
        return mail or ([Stop()] if wait else [])

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, StepReport)
        self.accounts.take(message)
        self.events += message.events
        self.last = message
        for event in message.events:
            if event.finish is not None:
                self.open_ids.discard(event.request_id)
                self.accounts.close(event.request_id)

    @property
    def busy_s(self) -> float:
        return self.last.measured.totals.busy_s if self.last is not None else 0.0

    @property
    def charged_s(self) -> float:
        return sum(meter.cost.device_s for meter in self.meters.values())


def run(
    requests: list[Request], seed: int, *, overlaps: bool, num_blocks: int = 64, abort_rate: float = 0.0
) -> tuple[Office, Scheduler]:
    dice, clock = random.Random(seed), StepClock()
    office = Office(requests[::-1], dice, abort_rate)
    office.accounts.begin(WORK, BLOCK)
    scheduler = Scheduler(KVCache(num_blocks, BLOCK), StepBudget(24, target_s=None, floor=BLOCK), max_num_seqs=6)
    runner = TimedRunner(FakeRunner(num_blocks, BLOCK, vocab_size=20, overlaps=overlaps), clock, dice)
    EngineLoop(Engine(scheduler, runner, WORK), office, clock).run()
    return office, scheduler


def some_requests(seed: int, count: int = 12) -> list[Request]:
    """With beginnings in common, ends at a stop token, penalties that wait for the host, and classes that displace."""
    dice = random.Random(seed)
    return [
        Request(
            f"r{index}",
            [dice.randint(0, 1) for _ in range(dice.randint(1, 60))],
            dice.randint(1, 30),
            SamplingParams(presence_penalty=dice.choice([0.0, 0.0, 0.5])),
            stop_token_ids=[3],
            priority=dice.choice(list(Priority)),
        )
        for index in range(count)
    ]


@settings(max_examples=examples(60))
@given(st.integers(0, 10_000), st.booleans(), st.sampled_from([24, 30, 200]), st.sampled_from([0.0, 0.03]))
def test_requests_are_charged_exactly_what_the_engine_worked(
    seed: int, overlaps: bool, num_blocks: int, abort_rate: float
) -> None:
    office, _ = run(some_requests(seed), seed, overlaps=overlaps, num_blocks=num_blocks, abort_rate=abort_rate)
    assert office.charged_s == pytest.approx(office.busy_s, rel=1e-9)


def test_preempted_requests_pay_for_what_is_computed_again_and_it_is_counted() -> None:
    requests = [Request(f"r{i}", [10 + i] * 20, 40) for i in range(5)]
    office, scheduler = run(requests, 1, overlaps=True, num_blocks=24)
    assert scheduler.counters.preemptions > 0
    assert office.last is not None
    assert office.last.measured.totals.recomputed_tokens > 0
    assert office.charged_s == pytest.approx(office.busy_s, rel=1e-9)


def test_a_prompt_found_in_the_cache_costs_less() -> None:
    prompt = [5, 6] * 100
    first, again = Request("first", prompt, 2), Request("again", prompt, 2)
    costs = []
    dice, clock = random.Random(3), StepClock()
    scheduler = Scheduler(KVCache(128, BLOCK), StepBudget(512, target_s=None, floor=BLOCK), max_num_seqs=6)
    runner = _Steady(TimedRunner(FakeRunner(128, BLOCK), clock, dice))
    for request in (first, again):
        office = Office([request], dice, 0.0)
        office.accounts.begin(WORK, BLOCK)
        EngineLoop(Engine(scheduler, runner, WORK), office, clock).run()
        costs.append(office.meters[request.id].cost.device_s)
    assert costs[1] < 0.1 * costs[0]


@dataclass
class _Steady:
    """Steps take as long as their tokens are many."""

    inner: TimedRunner
    overlaps: bool = False

    def submit(self, plan: StepPlan) -> StepHandle:
        self.inner.clock.now_s += 1e-3 * plan.num_tokens
        return self.inner.runner.submit(plan)


def test_nobody_pays_for_waiting() -> None:
    """The one who waits for a place behind a long answer costs what it costs alone."""
    alone, _ = run([Request("waits", [1, 2, 3], 3)], 5, overlaps=False)
    office, clock = Office([], random.Random(5), 0.0), StepClock()
    office.accounts.begin(WORK, BLOCK)
    office.requests = [Request("waits", [1, 2, 3], 3), Request("runs", [9] * 4, 200)]
    scheduler = Scheduler(KVCache(64, BLOCK), StepBudget(24, target_s=None, floor=BLOCK), max_num_seqs=1)
    runner = _Steady(TimedRunner(FakeRunner(64, BLOCK), clock, random.Random(5)))
    EngineLoop(Engine(scheduler, runner, WORK), office, clock).run()
    assert len(alone.events) == 3
    assert office.meters["waits"].cost.device_s == pytest.approx(5e-3)  # three tokens of the prompt and two decodes
    assert office.charged_s == pytest.approx(office.busy_s)


def test_blocks_are_charged_for_the_time_they_are_held() -> None:
    office, clock = Office([Request("a", [1] * 7, 3)], random.Random(1), 0.0), StepClock()
    office.accounts.begin(WORK, BLOCK)
    scheduler = Scheduler(KVCache(64, BLOCK), StepBudget(24, target_s=None, floor=BLOCK), max_num_seqs=1)
    runner = _Steady(TimedRunner(FakeRunner(64, BLOCK), clock, random.Random(1)))
    EngineLoop(Engine(scheduler, runner, WORK), office, clock).run()
    # 7 tokens in 2 blocks for 7 ms; then the 8th in 2 and the 9th in 3, for 1 ms each
    assert office.meters["a"].cost.kv_block_s == pytest.approx(2 * 7e-3 + 2 * 1e-3 + 3 * 1e-3)


def test_what_comes_after_a_meter_was_settled_is_told() -> None:
    meter, late = Meter(), []
    meter.add(1.0, 2.0)
    assert meter.settle(late.append) == Cost(1.0, 2.0)
    meter.add(0.5, 0.25)
    assert late == [Cost(0.5, 0.25)]
    assert meter.cost == Cost(1.5, 2.25)


@pytest.mark.parametrize("overlaps", [False, True])
async def test_over_the_wire_too_with_streams_that_are_closed_early(overlaps: bool) -> None:
    async with engine(overlaps=overlaps, step_s=0.001, num_blocks=100) as client:
        meters: list[Meter] = []

        async def ask(index: int, close_after: Callable[[], int] | None) -> None:
            request = Request(f"r{index}", [index % 3] * (5 + index), max_tokens=20)
            stream = client.open([request])
            meters.append(stream.meter)
            if close_after is None:
                await read(stream, request.id)
                return
            with stream:
                for _ in range(close_after()):
                    await stream.next()

        await asyncio.gather(*(ask(i, (lambda: 2) if i % 3 == 0 else None) for i in range(24)))
        await eventually_async(lambda: client.measured.load, lambda load: load.num_running == load.num_waiting == 0)
        await eventually_async(
            lambda: (sum(meter.cost.device_s for meter in meters), client.measured.totals.busy_s),
            lambda both: both[0] == pytest.approx(both[1], rel=1e-6),
        )
        assert client.measured.totals.busy_s > 0
