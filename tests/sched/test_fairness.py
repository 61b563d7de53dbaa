"""Several tenants in one engine: whose turn it is, what is lent, and what a greedy one can do to the others."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.request import Priority
from penstock.sched.fairness import DECODE_COST
from tests.sched.test_scheduler import BLOCK, Bench, expected, names

CHUNK, PLACES = 64, 8
LENGTHS = {  # of a greedy tenant's requests: prompt, answer
    "long prompts": (600, 1),
    "long answers": (10, 120),
    "both": (400, 200),
    "tiny": (3, 2),
}


def virtual(bench: Bench, tenant: str) -> float:
    return bench.scheduler._shares._shares[tenant].virtual


def num_running(bench: Bench, tenant: str) -> int:
    return sum(s.request.tenant == tenant for s in bench.scheduler._running)


class Crowd:
    """A tenant that always has so many requests here, of these lengths in turn."""

    def __init__(
        self, bench: Bench, tenant: str, count: int, lengths: list[tuple[int, int]], weight: float = 1.0
    ) -> None:
        self.bench, self.tenant, self.weight = bench, tenant, weight
        self._count, self._lengths = count, lengths
        self._sent = 0

    def feed(self) -> None:
        here = sum(s.request.tenant == self.tenant for s in self.bench.scheduler._sequences.values())
        for _ in range(self._count - here):
            self._sent += 1
            prompt_len, max_tokens = self._lengths[self._sent % len(self._lengths)]
            prompt = [(self._sent * 7919 + i * 31) % 997 for i in range(prompt_len)]
            options = {"tenant": self.tenant, "namespace": self.tenant, "weight": self.weight}
            self.bench.submit(f"{self.tenant}{self._sent}", prompt, max_tokens, **options)

    @property
    def is_waiting(self) -> bool:
        return any(
            s.table is None and s.request.tenant == self.tenant for s in self.bench.scheduler._sequences.values()
        )


def run(bench: Bench, crowds: list[Crowd], steps: int) -> None:
    for _ in range(steps):
        for crowd in crowds:
            crowd.feed()
        bench.step()


def steps_to_first_token(bench: Bench, crowds: list[Crowd], name: str) -> int:
    for count in range(1, 1000):
        run(bench, crowds, 1)
        if bench.outputs[name]:
            return count
    raise AssertionError("it never got a token")


# -- the bound


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_greedy_tenant_does_not_delay_anothers_first_token_by_a_step(kind: str) -> None:
    """A prompt that fits into a step is computed in the next one, as if nobody else were there."""
    bench = Bench(num_blocks=256, chunk=CHUNK, max_num_seqs=PLACES)
    crowd = Crowd(bench, "greedy", 40, [LENGTHS[kind]])
    run(bench, [crowd], 30)
    for number in range(8):
        prompt = [number + i for i in range(40)]
        bench.submit(f"light{number}", prompt, max_tokens=8, tenant="light")
        assert steps_to_first_token(bench, [crowd], f"light{number}") == 1
        run(bench, [crowd], 25)
        assert bench.outputs[f"light{number}"] == expected(prompt, 8)


def test_without_tenants_it_would_wait_for_the_backlog() -> None:
    bench = Bench(num_blocks=256, chunk=CHUNK, max_num_seqs=PLACES)
    crowd = Crowd(bench, "", 40, [LENGTHS["long prompts"]])
    run(bench, [crowd], 30)
    bench.submit("light", list(range(40)))
    assert steps_to_first_token(bench, [crowd], "light") > 300


lengths = st.lists(
    st.tuples(st.sampled_from([1, 5, 60, 200, 400]), st.sampled_from([1, 4, 50, 150])), min_size=1, max_size=3
)


@settings(max_examples=6)
@given(
    greedy=st.lists(lengths, min_size=1, max_size=3),
    num_blocks=st.sampled_from([160, 256, 1024]),
    steps=st.integers(1, 40),
)
def test_nor_do_several_whatever_they_send(greedy: list[list[tuple[int, int]]], num_blocks: int, steps: int) -> None:
    bench = Bench(num_blocks=num_blocks, chunk=CHUNK, max_num_seqs=PLACES)
    crowds = [Crowd(bench, f"g{index}-", 12, each) for index, each in enumerate(greedy)]
    run(bench, crowds, steps)
    for number in range(4):
        bench.submit(f"light{number}", [number + i for i in range(30)], max_tokens=3, tenant="light")
        assert steps_to_first_token(bench, crowds, f"light{number}") <= 1 + len(greedy)
        run(bench, crowds, 6)


def test_turns_that_a_tenant_could_not_use_do_not_come_all_at_once() -> None:
    """It has places for few, and answers long: it falls behind, and has six prompts when six answers end together."""
    bench = Bench(num_blocks=256, chunk=CHUNK, max_num_seqs=PLACES)
    crowds = [Crowd(bench, "g0-", 12, [(60, 1)]), Crowd(bench, "g1-", 12, [(60, 50)])]
    run(bench, crowds, 29)
    waits = []
    for number in range(4):
        bench.submit(f"light{number}", [number + i for i in range(30)], max_tokens=3, tenant="light")
        waits.append(steps_to_first_token(bench, crowds, f"light{number}"))
        run(bench, crowds, 6)
    assert max(waits) <= 1 + len(crowds)


short = st.lists(st.tuples(st.sampled_from([1, 8, 30, 60]), st.sampled_from([1, 2, 6])), min_size=1, max_size=3)


@settings(max_examples=6, deadline=None)
@given(
    kinds=st.tuples(short, short),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 3.0])] * 2),
    order=st.permutations([0, 1]),
)
def test_two_that_wait_for_tokens_are_given_the_same_by_their_weights(
    kinds: tuple[list[tuple[int, int]], list[tuple[int, int]]], weights: tuple[float, float], order: list[int]
) -> None:
    """The bound of the paper: what one can get ahead is what those of its sequences that run may still be given. There
    are places and blocks for all: where these are short, they are what is shared."""
    count = 6
    bench = Bench(num_blocks=2 * count * 140, chunk=CHUNK, max_num_seqs=2 * count)
    crowds = [Crowd(bench, "ab"[i], count, kinds[i], weights[i]) for i in order]
    longest = max(prompt + answer for kind in kinds for prompt, answer in kind)
    most = (CHUNK + DECODE_COST * count * longest) / min(weights)
    began: tuple[float, float] | None = None
    for _ in range(200):
        run(bench, crowds, 1)
        now = virtual(bench, "a"), virtual(bench, "b")
        if not all(crowd.is_waiting for crowd in crowds):
            began = None
            continue
        began = began or now
        assert abs((now[0] - began[0]) - (now[1] - began[1])) <= 2 * most


def test_two_alike_get_the_same_and_three_to_one_three_times_as_much() -> None:
    for weight in (1.0, 3.0):
        bench = Bench(num_blocks=400, chunk=CHUNK, max_num_seqs=PLACES)
        crowds = [Crowd(bench, "a", 20, [(50, 20)], weight), Crowd(bench, "b", 20, [(50, 20)])]
        run(bench, crowds, 200)
        given_to = {
            tenant: sum(len(output) for name, output in bench.outputs.items() if name.startswith(tenant))
            for tenant in "ab"
        }
        assert given_to["a"] / given_to["b"] == pytest.approx(weight, rel=0.1)


# -- turns


def test_one_tenant_alone_is_scheduled_as_nobody_is() -> None:
    plans = []
    for tenant in ("", "acme"):
        bench = Bench(num_blocks=9, chunk=16, max_num_seqs=3)
        for number in range(9):
            priority = Priority(number % 3)
            bench.submit(f"r{number}", [number] * (3 + 5 * number % 17), 6, priority=priority, tenant=tenant)
        seen = []
        while (plan := bench.step()) is not None:
            seen.append([(s.request_id, s.start, s.num_tokens) for s in plan.slices])
        plans.append((seen, bench.scheduler.counters))
    assert plans[0] == plans[1]
    assert plans[0][1].preemptions > 0


def test_a_prompt_in_the_middle_makes_room_for_another_tenants() -> None:
    bench = Bench(chunk=8)
    bench.submit("long", list(range(40)), tenant="a")
    assert names(bench.step()) == ["long"]
    bench.submit("short", [1, 2, 3], tenant="b")
    plan = bench.step()
    assert plan is not None
    assert [(s.request_id, s.num_tokens) for s in plan.slices] == [("short", 3), ("long", 5)]


def test_who_was_away_has_saved_nothing_up() -> None:
    bench = Bench(num_blocks=400, chunk=CHUNK, max_num_seqs=PLACES)
    bench.submit("b0", [1], tenant="b")
    crowd = Crowd(bench, "a", 20, [(50, 20)])
    run(bench, [crowd], 300)
    late = Crowd(bench, "b", 20, [(50, 20)])
    late.feed()
    assert virtual(bench, "a") - 3 * CHUNK < virtual(bench, "b") < virtual(bench, "a")


def test_who_leaves_for_a_moment_does_not_lose_a_debt() -> None:
    bench = Bench(num_blocks=400, chunk=CHUNK, max_num_seqs=PLACES)
    bench.submit("light", [1], max_tokens=200, tenant="b")
    bench.submit("heavy", list(range(500)), max_tokens=1, tenant="a")
    while "heavy" not in bench.finished:
        bench.step()
    owed = virtual(bench, "a")
    bench.submit("again", [1, 2, 3], tenant="a")
    assert virtual(bench, "a") == owed > virtual(bench, "b") + 400


def test_what_one_was_given_alone_counts_once_another_comes() -> None:
    bench = Bench(num_blocks=400, chunk=CHUNK, max_num_seqs=PLACES)
    run(bench, [crowd := Crowd(bench, "a", 20, [(50, 20)])], 50)
    bench.submit("b0", [1], tenant="b")
    counters = bench.scheduler.counters
    assert virtual(bench, "a") == counters.work
    assert virtual(bench, "b") == counters.work - CHUNK
    run(bench, [crowd], 1)
    assert virtual(bench, "b") < virtual(bench, "a")


def test_classes_stay_above_turns() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("a1", [1], max_tokens=30, tenant="a")
    bench.step()
    bench.submit("b1", [2], tenant="b", priority=Priority.LOW)
    bench.submit("a2", [3], tenant="a", priority=Priority.HIGH)
    bench.step()
    assert names(bench.step()) == ["a2"]


# -- what is lent


def test_an_idle_tenants_share_is_lent_and_comes_back_when_it_wants_it() -> None:
    bench = Bench(num_blocks=40, chunk=CHUNK, max_num_seqs=PLACES)
    for number in range(4):
        bench.submit(f"a{number}", [number] * 32, max_tokens=60, tenant="a")
    bench.step()
    bench.step()
    assert num_running(bench, "a") == 4  # of 40 blocks they hold 32
    bench.submit("b", [9] * 60, max_tokens=4, tenant="b")
    bench.step()
    assert bench.outputs["b"]
    assert bench.scheduler.counters.preemptions >= 1
    assert "a3" not in [s.request.id for s in bench.scheduler._running]  # the last comer
    bench.run()
    assert all(bench.outputs[f"a{number}"] == expected([number] * 32, 60) for number in range(4))


def test_places_are_lent_too() -> None:
    bench = Bench(num_blocks=400, max_num_seqs=4)
    for number in range(6):
        bench.submit(f"a{number}", [number], max_tokens=60, tenant="a")
    bench.step()
    for number in range(4):
        bench.submit(f"b{number}", [10 + number], max_tokens=60, tenant="b")
    bench.step()
    assert (num_running(bench, "a"), num_running(bench, "b")) == (2, 2)
    before = bench.scheduler.counters.preemptions
    for _ in range(20):
        bench.step()
    assert bench.scheduler.counters.preemptions == before  # each has its own, and leaves the other's alone


def test_who_is_within_its_share_gives_way_to_no_claim() -> None:
    bench = Bench(num_blocks=40, chunk=CHUNK, max_num_seqs=PLACES)
    bench.submit("a", [1] * 60, max_tokens=10, tenant="a")
    bench.submit("b", [2] * 60, max_tokens=10, tenant="b")
    bench.step()
    bench.step()
    bench.submit("b2", [3] * 60, max_tokens=10, tenant="b")
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_short_memory_takes_from_the_tenant_furthest_over_its_share_and_not_from_the_last_comer() -> None:
    bench = Bench(num_blocks=16, chunk=CHUNK, max_num_seqs=PLACES)
    for number in range(3):
        bench.submit(f"a{number}", [number] * 14, max_tokens=40, tenant="a")
    bench.submit("b", [9] * 6, max_tokens=20, tenant="b")
    for _ in range(12):
        bench.step()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler._sequences["b"].epoch == 0
    bench.run()


def test_who_needs_more_than_its_share_has_its_turn_when_it_is_overdue() -> None:
    """Others keep their shares busy, so that there is never room enough; time goes on by 10 ms a step."""
    bench = Bench(num_blocks=40, chunk=CHUNK, max_num_seqs=PLACES, aging_s=0.5)
    crowds = [Crowd(bench, tenant, 6, [(40, 8)]) for tenant in "bc"]
    run(bench, crowds, 20)
    bench.submit("giant", list(range(120)), max_tokens=20, tenant="a")
    run(bench, crowds, 60)
    assert not bench.outputs["giant"]
    run(bench, crowds, 100)
    assert bench.outputs["giant"] == expected(list(range(120)), 20)
    assert bench.scheduler._sequences.get("giant") is None


def test_a_backlog_that_has_grown_old_does_not_go_before_everybody() -> None:
    bench = Bench(num_blocks=256, chunk=CHUNK, max_num_seqs=PLACES, aging_s=0.2)
    crowd = Crowd(bench, "greedy", 60, [(100, 5)])
    run(bench, [crowd], 100)  # its oldest have been here for five times as long
    waits = []
    for number in range(30):
        bench.submit(f"light{number}", [number + i for i in range(30)], max_tokens=3, tenant="light")
        waits.append(steps_to_first_token(bench, [crowd], f"light{number}"))
        run(bench, [crowd], 10)
    assert sorted(waits)[27] == 1  # once in a while the oldest goes first
    assert max(waits) <= 3


def test_many_tenants_each_find_a_place() -> None:
    bench = Bench(num_blocks=64, chunk=32, max_num_seqs=4)
    for number in range(1200):
        bench.submit(f"r{number}", [number % 900] * 28, max_tokens=2, tenant=f"t{number}")
        while len(bench.scheduler._sequences) > 20:
            bench.step()
    bench.run()
    order = [int(event.request_id[1:]) for event in bench.events if event.cached_tokens is not None]
    assert max(abs(place - number) for place, number in enumerate(order)) <= 150  # the newest are not the first
    assert len(bench.scheduler._shares._shares) < 1100


def test_blocks_of_a_shared_prefix_count_once() -> None:
    bench = Bench(num_blocks=40, chunk=CHUNK, max_num_seqs=PLACES)
    shared = list(range(8 * BLOCK))
    bench.submit("a0", [*shared, 100], max_tokens=20, tenant="a")
    bench.step()
    for number in range(1, 5):
        bench.submit(f"a{number}", [*shared, 100 + number], max_tokens=20, tenant="a")
    bench.step()
    running = bench.scheduler._running
    assert len(running) == 5
    assert running[0].share.num_blocks == sum(not bench.cache.pool.is_free(block_id) for block_id in range(40))
