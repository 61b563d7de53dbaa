"""Whatever happens to the cache, the routing blocks it tells of are those that it holds whole."""

import random
from dataclasses import dataclass, field
from functools import cache
from itertools import dropwhile

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.hashing import BlockHash, routing_hashes
from penstock.core.request import Priority, Request
from penstock.core.tiers import Tier
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import BlockTable, KVCache, TokenHashes
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepPlan, StepResult
from penstock.sched.scheduler import Scheduler
from tests.examples import examples

BLOCK, ROUTING = 2, 6  # three blocks to a routing block

HOST_BLOCKS = st.sampled_from([0, 5, 40])

Text = tuple[str, tuple[int, ...]]  # a namespace and tokens

SEEDS = st.integers(0, 1 << 30)  # one number for a rule: to draw more takes longer than all the rest


def chain(text: Text) -> TokenHashes:
    hashes = TokenHashes(text[0], BLOCK)
    hashes.extend(text[1])
    return hashes


@cache
def routing_runs(text: Text) -> list[tuple[int, list[BlockHash]]]:
    """Every routing block of a text: its name and the blocks that it is made of."""
    parts, hashes = ROUTING // BLOCK, chain(text).hashes
    names = routing_hashes(*text, ROUTING)
    return [(name, hashes[index * parts : (index + 1) * parts]) for index, name in enumerate(names)]


@dataclass
class Told:
    """Adds up what a cache says, and recomputes it from the cache's content and all texts that ever were in it."""

    cache: KVCache
    texts: set[Text] = field(default_factory=set)
    held: dict[int, Tier] = field(default_factory=dict)

    def hear(self) -> None:
        assert self.cache.routing is not None
        if (changes := self.cache.routing.changes()) is None:
            return
        named = [*changes.stored, *changes.on_host, *changes.removed]
        assert named
        assert len(named) == len(set(named))
        assert all(self.held.get(name) is not Tier.DEVICE for name in changes.stored)
        assert all(self.held.get(name) is not Tier.HOST for name in changes.on_host)
        for name in changes.removed:
            del self.held[name]
        self.held |= dict.fromkeys(changes.stored, Tier.DEVICE) | dict.fromkeys(changes.on_host, Tier.HOST)

    def check(self) -> None:
        assert self.held == self.expected()
        assert self.cache.routing is not None
        assert self.cache.routing.changes() is None

    def expected(self) -> dict[int, Tier]:
        found = {}
        for text in self.texts:
            for name, run in routing_runs(text):
                if (tier := self.tier(run)) is not None:
                    found[name] = tier
        return found

    def tier(self, run: list[BlockHash]) -> Tier | None:
        """As a match finds them: some on the device, and all after those on the host."""
        pool = self.cache.pool
        rest = list(dropwhile(lambda own: pool.find(own) is not None, run))
        if not rest:
            return Tier.DEVICE
        return Tier.HOST if pool.host is not None and all(own in pool.host for own in rest) else None


@dataclass
class Owner:
    text: Text
    table: BlockTable
    hashes: TokenHashes
    num_computed: int


class CacheMachine(RuleBasedStateMachine):
    """Straight at the cache: owners that compute the same text at once, in any order, and let go at any time."""

    @initialize(num_blocks=st.integers(8, 24), host_blocks=HOST_BLOCKS)
    def start(self, num_blocks: int, host_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK, routing_tokens=ROUTING, host_blocks=host_blocks)
        self.told = Told(self.cache)
        self.owners: list[Owner] = []

    @rule(seed=SEEDS)
    def acquire(self, seed: int) -> None:
        """One that does not look computes again what is there: its copies are found only once the others are gone."""
        dice = random.Random(seed)
        tokens = [0] * dice.randint(1, 14) + dice.choice([[], [1], [1, 2, 3]])  # mostly one beginning
        text = (dice.choice(["", "", "", "other"]), tuple(tokens))
        looks = dice.random() < 0.5
        hashes = chain(text)
        match = self.cache.match(hashes, tokens, len(tokens) - 1 if looks else 0)
        table = self.cache.acquire(match, len(tokens), hashes, tokens)
        if table is not None:
            self.told.texts.add(text)
            self.owners.append(Owner(text, table, hashes, match.num_tokens))

    @precondition(lambda self: self.owners)
    @rule(seed=SEEDS)
    def compute(self, seed: int) -> None:
        dice = random.Random(seed)
        owner, count = dice.choice(self.owners), dice.choice([2, 4, 20, 20])
        owner.num_computed = min(owner.num_computed + count, len(owner.text[1]))
        owner.table.publish(owner.hashes, owner.text[1], owner.num_computed)

    @precondition(lambda self: self.owners)
    @rule(seed=SEEDS)
    def release(self, seed: int) -> None:
        owner = random.Random(seed).choice(self.owners)
        self.owners.remove(owner)
        owner.table.release()

    @rule(count=st.sampled_from([1, 2, 4, 24, 24]))
    def evict(self, count: int) -> None:
        blocks = self.cache.pool.allocate(min(count, self.cache.pool.num_free))
        if blocks is not None:
            self.cache.pool.release(blocks)

    @rule(is_done=st.booleans())
    def copy(self, is_done: bool) -> None:
        """What a step was to copy; a step may fail."""
        moves = self.cache.pool.take_moves()
        if not is_done:
            self.cache.undo(moves)

    @rule(seed=SEEDS)
    def many_things(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(12):
            rule_seed = dice.randrange(1 << 30)
            match dice.randrange(6):
                case 0:
                    self.evict(dice.choice([1, 2, 4, 24]))
                case 1:
                    self.copy(dice.random() < 0.5)
                case 2 if self.owners:
                    self.release(rule_seed)
                case 3 | 4 if self.owners:
                    self.compute(rule_seed)
                case _:
                    self.acquire(rule_seed)
        self.listen()

    @rule()
    def listen(self) -> None:
        """Not after every change: what came and went between two calls is not told."""
        self.told.hear()
        self.told.check()

    def teardown(self) -> None:
        if hasattr(self, "told"):
            self.listen()


class SchedulerMachine(RuleBasedStateMachine):
    """With the scheduler above it, that shares, copies on write and preempts."""

    @initialize(num_blocks=st.integers(16, 32), overlaps=st.booleans(), host_blocks=HOST_BLOCKS)
    def start(self, num_blocks: int, overlaps: bool, host_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK, routing_tokens=ROUTING, host_blocks=host_blocks)
        self.told = Told(self.cache)
        self.scheduler = Scheduler(self.cache, StepBudget(12, target_s=None, floor=4), max_num_seqs=4, aging_s=1.0)
        self.runner = FakeRunner(num_blocks, BLOCK, vocab_size=3, overlaps=overlaps, host_blocks=host_blocks)
        self.in_flight: tuple[StepPlan, StepResult] | None = None
        self.texts: dict[str, tuple[str, list[int]]] = {}
        self.now = 0.0

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        dice = random.Random(seed)
        prompt = [0] * dice.randint(1, 17) + dice.choice([[], [1], [1, 0, 1]])  # with its answer it fits 16 blocks
        namespace, priority = dice.choice(["", "other"]), dice.choice(list(Priority))
        request = Request(f"r{len(self.texts)}", prompt, dice.randint(1, 12), namespace=namespace, priority=priority)
        self.texts[request.id] = (namespace, list(prompt))
        self.scheduler.submit(request, self.now)

    @precondition(lambda self: self.texts)
    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self.scheduler.abort(random.Random(seed).choice(sorted(self.texts)))

    @rule(seed=SEEDS)
    def many_things(self, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(8):
            rule_seed = dice.randrange(1 << 30)
            match dice.randrange(4):
                case 0:
                    self.submit(rule_seed)
                case 1 if self.texts:
                    self.abort(rule_seed)
                case _:
                    self.steps(dice.randint(1, 6))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now += 0.01
            previous, self.in_flight = self.in_flight, None
            if not self.runner.overlaps:
                self.commit(previous)
                previous = None
            if (plan := self.scheduler.plan(self.now)) is not None:
                self.in_flight = (plan, self.runner.submit(plan).result())
            self.commit(previous)
            self.told.hear()

    def commit(self, step: tuple[StepPlan, StepResult] | None) -> None:
        if step is not None:
            for event in self.scheduler.commit(*step, self.now):
                self.texts[event.request_id][1].extend(event.token_ids)

    @invariant()
    def what_was_told_is_what_is_held(self) -> None:
        if hasattr(self, "told"):
            self.told.hear()
            self.told.texts = {(namespace, tuple(token_ids)) for namespace, token_ids in self.texts.values()}
            self.told.check()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=examples(40), stateful_step_count=30)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(30), stateful_step_count=20)


def own(cache: KVCache, tokens: list[int], namespace: str = "") -> BlockTable:
    hashes = chain((namespace, tuple(tokens)))
    table = cache.acquire(cache.match(hashes, tokens, len(tokens) - 1), len(tokens), hashes, tokens)
    assert table is not None
    table.publish(hashes, tokens, len(tokens))
    return table


def test_a_routing_block_comes_with_its_last_part_and_goes_with_its_first_lost_one() -> None:
    cache = KVCache(8, BLOCK, routing_tokens=ROUTING)
    assert cache.routing is not None
    own(cache, [1, 2, 3, 4]).release()
    assert cache.routing.changes() is None
    own(cache, [1, 2, 3, 4, 5, 6, 7]).release()
    name = routing_hashes("", [1, 2, 3, 4, 5, 6], ROUTING)
    assert cache.routing.changes() == (name, [], [])
    assert cache.routing.changes() is None
    cache.pool.allocate(6)
    assert cache.routing.changes() == ([], name, [])


def test_prompts_that_part_ways_inside_a_routing_block_share_its_parts() -> None:
    cache = KVCache(8, BLOCK, routing_tokens=ROUTING)
    assert cache.routing is not None
    left, right = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 8, 9]
    for tokens in (left, right):
        own(cache, tokens).release()
    names = routing_hashes("", left, ROUTING) + routing_hashes("", right, ROUTING)
    changes = cache.routing.changes()
    assert changes is not None
    assert sorted(changes.stored) == sorted(names)
    cache.pool.allocate(8)
    changes = cache.routing.changes()
    assert changes is not None
    assert sorted(changes.removed) == sorted(names)


def test_a_part_that_comes_back_makes_every_run_whole_that_waited_for_it() -> None:
    """A part can go before those after it: two owners computed it at once, and only the older copy is ever found."""
    cache = KVCache(16, BLOCK, routing_tokens=ROUTING)
    assert cache.routing is not None
    tokens = [1, 2, 3, 4, 5, 6]
    hashes = chain(("", tuple(tokens)))
    nothing = cache.match(hashes, tokens, 0)
    first, second = (cache.acquire(nothing, 6, hashes) for _ in range(2))
    assert first is not None
    assert second is not None
    first.publish(hashes, tokens, BLOCK)
    second.publish(hashes, tokens, 6)
    name = routing_hashes("", tokens, ROUTING)
    assert cache.routing.changes() == (name, [], [])
    first.release()
    taken = cache.pool.allocate(cache.pool.num_free)  # the first copy of the first part goes
    assert taken is not None
    assert cache.routing.changes() == ([], name, [])
    cache.pool.release(taken)
    own(cache, [1, 2, 9])
    assert cache.routing.changes() == (name, [], [])


def test_a_routing_block_that_leaves_the_device_is_on_the_host_until_it_comes_back_or_goes() -> None:
    cache = KVCache(4, BLOCK, routing_tokens=ROUTING, host_blocks=8)
    assert cache.routing is not None
    first, second, third, fourth = (list(range(start, start + 8)) for start in (10, 20, 30, 40))
    names = [routing_hashes("", tokens[:6], ROUTING) for tokens in (first, second, third, fourth)]
    own(cache, first).release()
    assert cache.routing.changes() == (names[0], [], [])
    own(cache, second).release()
    assert cache.routing.changes() == (names[1], [], names[0])
    own(cache, first).release()  # it comes back, and the other one goes
    assert cache.routing.changes() == (names[0], [], names[1])
    own(cache, third).release()
    assert cache.routing.changes() == (names[2], [], names[0])
    own(cache, fourth).release()
    assert cache.routing.changes() == (names[3], names[1], names[2])


def test_a_part_that_is_computed_again_makes_those_on_the_host_after_it_of_use() -> None:
    cache = KVCache(4, BLOCK, routing_tokens=ROUTING, host_blocks=8)
    assert cache.routing is not None
    tokens = [1, 2, 3, 4, 5, 6]
    name = routing_hashes("", tokens, ROUTING)
    own(cache, tokens).release()
    blocks = cache.pool.allocate(4)  # all of it goes to the host
    assert blocks is not None
    cache.routing.changes()
    cache.undo(cache.pool.take_moves()[-1:])  # its first part, which went last, was not copied after all
    assert cache.routing.changes() == ([], name, [])
    cache.pool.release(blocks)
    own(cache, [1, 2, 9]).release()
    assert cache.routing.changes() == ([], [], name)


def test_a_cache_that_shares_nothing_or_has_blocks_of_another_measure_tells_nothing() -> None:
    assert KVCache(8, BLOCK, share_prefixes=False, routing_tokens=ROUTING).routing is None
    assert KVCache(8, 4, routing_tokens=ROUTING).routing is None
    assert KVCache(8, 512, routing_tokens=256).routing is None
    assert KVCache(8, BLOCK).routing is None
