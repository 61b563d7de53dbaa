"""No order of submit, step, abort, preempt and finish leaks a block, exceeds a budget or gives a wrong token."""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.request import Priority, Request
from penstock.engine.engine import Step
from penstock.engine.fake import FakeRunner, fake_token
from penstock.engine.fake_disk import FakeDisk
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepPlan
from penstock.sched.scheduler import Scheduler
from tests.examples import examples

BLOCK, CHUNK, MAX_SEQS, VOCAB, FLOOR = 4, 12, 4, 50, 4

# Nine tenths of a machine's time is Hypothesis drawing: so a rule draws one number, and dice do the rest. Prompts
# mostly begin alike, so that they share blocks, and there are two namespaces, which must never share.
SEEDS = st.integers(0, 1 << 30)


@dataclass
class Client:
    request: Request
    output: list[int] = field(default_factory=list)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(10, 24),
        overlaps=st.booleans(),
        host_blocks=st.sampled_from([0, 3, 8, 40]),
        disk_blocks=st.sampled_from([0, 2, 60]),
    )
    def start(self, num_blocks: int, overlaps: bool, host_blocks: int, disk_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK, host_blocks=host_blocks)
        self.budget = StepBudget(CHUNK, target_s=0.05, floor=FLOOR)
        self.scheduler = Scheduler(self.cache, self.budget, max_num_seqs=MAX_SEQS, aging_s=1.0)
        self.runner = FakeRunner(num_blocks, BLOCK, vocab_size=VOCAB, overlaps=overlaps, host_blocks=host_blocks)
        self.in_flight: Step | None = None
        self.open: dict[str, Client] = {}
        self.block_namespace: dict[int, str] = {}  # whose tokens lie in each block
        self.disk = FakeDisk(self.runner, disk_blocks, self.block_namespace) if host_blocks and disk_blocks else None
        if self.disk is not None:
            self.cache.keep_on_disk(self.disk)
        self.count = 0
        self.now = 0.0

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        dice = random.Random(seed)
        prompt = [0] * dice.randint(1, 24) + dice.choice([[], [1], [1, 0, 1]])
        max_tokens = dice.randint(1, 12)
        num_made_elsewhere = dice.choice([0, 0, 3])
        tenant = dice.choice(["", "", "b", "c"])
        self.count += 1
        output: list[int] = []
        for _ in range(min(num_made_elsewhere, max_tokens - 1)):
            output.append(fake_token([*prompt, *output], VOCAB))
        request = Request(
            f"r{self.count}",
            prompt,
            max_tokens,
            namespace=dice.choice(["", "other"]),
            stop_token_ids=[dice.randrange(VOCAB)],
            priority=dice.choice(list(Priority)),
            output_ids=output,
            tenant=tenant,
            weight=3.0 if tenant == "b" else 1.0,
            is_resumed=bool(output),
        )
        self.open[request.id] = Client(request, list(output))
        self.scheduler.submit(request, self.now)

    @precondition(lambda self: self.open)
    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        name = random.Random(seed).choice(sorted(self.open))
        assert self.scheduler.abort(name)
        del self.open[name]

    @rule(seed=SEEDS)
    def steps(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(dice.randint(1, 2)):
            self.step(dice.choice([0.001, 0.04, 0.2, 3.0]))
            for _ in range(dice.randint(0, 6)):
                self.work_on_disk(dice)

    def work_on_disk(self, dice: random.Random) -> None:
        if self.disk is None:
            return
        if self.disk.num_jobs:
            self.disk.do_job(succeeds=dice.random() < 0.9)
        elif self.disk.files and dice.random() < 0.1:
            self.disk.expire(dice.choice(sorted(self.disk.files)))

    @rule(seed=SEEDS)
    def many_things(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(12):
            rule_seed = dice.randrange(1 << 30)
            match dice.randrange(5):
                case 0 | 1:
                    self.submit(rule_seed)
                case 2 if self.open:
                    self.abort(rule_seed)
                case _:
                    self.steps(rule_seed)

    def step(self, elapsed_s: float) -> None:
        """One turn of the engine's loop."""
        previous, self.in_flight = self.in_flight, None
        if previous is not None and not self.runner.overlaps:
            self.commit(previous, elapsed_s)
            previous = None
        plan = self.plan()
        if plan is not None:
            self.check_executable(plan)
            self.in_flight = Step(plan, self.runner.submit(plan), self.now, is_ahead=False)
        if previous is not None:
            self.commit(previous, elapsed_s)

    def plan(self) -> StepPlan | None:
        return self.scheduler.plan(self.now)

    def commit(self, step: Step, elapsed_s: float) -> None:
        self.now += elapsed_s
        decodes = sum(s.num_tokens == 1 for s in step.plan.slices)
        self.budget.observe(step.plan.num_tokens, decodes, elapsed_s)
        for event in self.scheduler.commit(step.plan, step.handle.result(), self.now):
            client = self.open[event.request_id]
            for token in event.token_ids:
                assert token == fake_token([*client.request.prompt_ids, *client.output], VOCAB)
                client.output.append(token)
            assert len(client.output) <= client.request.max_tokens
            if event.finish:
                assert (
                    client.output[-1] in client.request.stop_token_ids
                    or len(client.output) == client.request.max_tokens
                )
                del self.open[event.request_id]

    def check_executable(self, plan: StepPlan) -> None:
        decodes = sum(s.num_tokens - len(s.ahead) == 1 for s in plan.slices)
        assert plan.num_tokens <= max(CHUNK, decodes + FLOOR)
        assert len(plan.slices) <= MAX_SEQS
        assert len({s.request_id for s in plan.slices}) == len(plan.slices)
        written: set[tuple[int, int]] = set()
        for source, target in plan.copies:
            self.block_namespace[target] = self.block_namespace[source]
        for planned in plan.slices:
            assert planned.num_tokens > 0
            end = planned.start + planned.num_tokens
            assert end <= len(planned.block_ids) * BLOCK
            slots = {(planned.block_ids[p // BLOCK], p % BLOCK) for p in range(planned.start, end)}
            assert not slots & written, "two sequences write the same slot"
            written |= slots
            namespace = self.open[planned.request_id].request.namespace
            for index, block_id in enumerate(planned.block_ids[: -(-end // BLOCK)]):
                if index * BLOCK >= planned.start:
                    self.block_namespace[block_id] = namespace
                assert self.block_namespace[block_id] == namespace, "a block of another namespace is read"

    @invariant()
    def no_block_leaks(self) -> None:
        if not hasattr(self, "scheduler") or self.scheduler.has_work:
            return
        assert self.cache.pool.num_free == self.cache.pool.num_blocks
        host, disk = self.cache.pool.host, self.cache.disk
        reads = disk._reading if disk is not None else {}
        assert set(self.cache._pending) == {own for own, read in reads.items() if read.is_awaited}
        if host is not None:
            being_read = [read.block + host._first_id for read in reads.values()]
            ids = [*host._ids.values(), *host._free, *being_read]
            assert sorted(ids) == list(range(host._first_id, host._first_id + host.num_blocks))
        if disk is not None:
            assert len(disk) <= disk.files.num_blocks
            assert not {*disk._writing} & {*disk._index}

    def teardown(self) -> None:
        """Whatever happened, everything that is still open finishes: nothing starves."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(40 * (len(self.open) + 1) + 2):
            if not self.scheduler.has_work and self.in_flight is None:
                break
            self.step(0.001)
            if self.disk is not None:
                self.disk.do_all()
        assert not self.open
        assert not self.scheduler.has_work
        self.no_block_leaks()
        if self.disk is not None:
            self.check_disk_at_rest(self.disk)

    def check_disk_at_rest(self, disk: FakeDisk) -> None:
        """Once all is done the policy knows every file and no other, and holds nothing back."""
        for _ in range(100):
            disk.do_all()
            self.cache.poll(self.now)
        known = self.cache.disk
        assert known is not None
        assert not known.is_reading
        assert not known.is_writing
        assert disk.num_jobs == 0
        assert set(disk.files) == set(known._index)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(60), stateful_step_count=20)
