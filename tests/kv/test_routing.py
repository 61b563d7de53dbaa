"""Whatever happens to the cache, the routing blocks it tells of are those that it holds whole."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.core.hashing import routing_hashes
from penstock.core.request import Priority, Request
from penstock.engine.fake import FakeRunner
from penstock.kv.cache import BlockTable, KVCache, TokenHashes
from penstock.sched.budget import StepBudget
from penstock.sched.plan import StepPlan, StepResult
from penstock.sched.scheduler import Scheduler

BLOCK, ROUTING = 2, 6  # three blocks to a routing block

Text = tuple[str, tuple[int, ...]]  # a namespace and tokens

# Mostly one beginning, and the same few ways to go on.
texts = st.builds(lambda length, end: [0] * length + end, st.integers(1, 14), st.sampled_from([[], [1], [1, 2, 3]]))


def chain(text: Text) -> TokenHashes:
    hashes = TokenHashes(text[0], BLOCK)
    hashes.extend(text[1])
    return hashes


@dataclass
class Told:
    """Adds up what a cache says, and recomputes it from the cache's content and all texts that ever were in it."""

    cache: KVCache
    texts: set[Text] = field(default_factory=set)
    held: set[int] = field(default_factory=set)

    def hear(self) -> None:
        assert self.cache.routing is not None
        if (changes := self.cache.routing.changes()) is None:
            return
        stored, removed = set(changes.stored), set(changes.removed)
        assert (len(stored), len(removed)) == (len(changes.stored), len(changes.removed))
        assert stored or removed
        assert not stored & self.held
        assert removed <= self.held
        self.held = self.held - removed | stored

    def check(self) -> None:
        assert self.held == self.expected()
        assert self.cache.routing is not None
        assert self.cache.routing.changes() is None

    def expected(self) -> set[int]:
        parts, found = ROUTING // BLOCK, set()
        for namespace, token_ids in self.texts:
            hashes = chain((namespace, token_ids)).hashes
            is_held = [self.cache.pool.find(own) is not None for own in hashes]
            for index, name in enumerate(routing_hashes(namespace, token_ids, ROUTING)):
                if all(is_held[index * parts : (index + 1) * parts]):
                    found.add(name)
        return found


@dataclass
class Owner:
    text: Text
    table: BlockTable
    hashes: TokenHashes
    num_computed: int


class CacheMachine(RuleBasedStateMachine):
    """Straight at the cache: owners that compute the same text at once, in any order, and let go at any time."""

    @initialize(num_blocks=st.integers(8, 24))
    def start(self, num_blocks: int) -> None:
        self.cache = KVCache(num_blocks, BLOCK, routing_tokens=ROUTING)
        self.told = Told(self.cache)
        self.owners: list[Owner] = []

    @rule(tokens=texts, namespace=st.sampled_from(["", "", "", "other"]), looks=st.booleans())
    def acquire(self, tokens: list[int], namespace: str, looks: bool) -> None:
        """One that does not look computes again what is there: its copies are found only once the others are gone."""
        text = (namespace, tuple(tokens))
        hashes = chain(text)
        match = self.cache.match(hashes, tokens, len(tokens) - 1 if looks else 0)
        table = self.cache.acquire(match, len(tokens), hashes)
        if table is not None:
            self.told.texts.add(text)
            self.owners.append(Owner(text, table, hashes, match.num_tokens))

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), count=st.sampled_from([2, 4, 20, 20]))
    def compute(self, data: st.DataObject, count: int) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        owner.num_computed = min(owner.num_computed + count, len(owner.text[1]))
        owner.table.publish(owner.hashes, owner.text[1], owner.num_computed)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        owner.table.release()

    @rule(count=st.sampled_from([1, 2, 4, 24, 24]))
    def evict(self, count: int) -> None:
        blocks = self.cache.pool.allocate(min(count, self.cache.pool.num_free))
        if blocks is not None:
            self.cache.pool.release(blocks)

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

    @initialize(num_blocks=st.integers(16, 32), overlaps=st.booleans())
    def start(self, num_blocks: int, overlaps: bool) -> None:
        self.cache = KVCache(num_blocks, BLOCK, routing_tokens=ROUTING)
        self.told = Told(self.cache)
        self.scheduler = Scheduler(self.cache, StepBudget(12, target_s=None, floor=4), max_num_seqs=4, aging_s=1.0)
        self.runner = FakeRunner(num_blocks, BLOCK, vocab_size=3, overlaps=overlaps)
        self.in_flight: tuple[StepPlan, StepResult] | None = None
        self.texts: dict[str, tuple[str, list[int]]] = {}
        self.now = 0.0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), max_tokens=st.integers(1, 12),
        namespace=st.sampled_from(["", "other"]), priority=st.sampled_from(Priority),
    )  # fmt: skip
    def submit(self, prompt: list[int], max_tokens: int, namespace: str, priority: Priority) -> None:
        request = Request(f"r{len(self.texts)}", prompt, max_tokens, namespace=namespace, priority=priority)
        self.texts[request.id] = (namespace, list(prompt))
        self.scheduler.submit(request, self.now)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.texts))))

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
TestCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def own(cache: KVCache, tokens: list[int], namespace: str = "") -> BlockTable:
    hashes = chain((namespace, tuple(tokens)))
    table = cache.acquire(cache.match(hashes, tokens, len(tokens) - 1), len(tokens), hashes)
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
    assert cache.routing.changes() == (name, [])
    assert cache.routing.changes() is None
    cache.pool.allocate(6)
    assert cache.routing.changes() == ([], name)


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
    assert cache.routing.changes() == (name, [])
    first.release()
    taken = cache.pool.allocate(cache.pool.num_free)  # the first copy of the first part goes
    assert taken is not None
    assert cache.routing.changes() == ([], name)
    cache.pool.release(taken)
    own(cache, [1, 2, 9])
    assert cache.routing.changes() == (name, [])


def test_a_cache_that_shares_nothing_or_has_blocks_of_another_measure_tells_nothing() -> None:
    assert KVCache(8, BLOCK, share_prefixes=False, routing_tokens=ROUTING).routing is None
    assert KVCache(8, 4, routing_tokens=ROUTING).routing is None
    assert KVCache(8, 512, routing_tokens=256).routing is None
    assert KVCache(8, BLOCK).routing is None
