"""A whole fleet: every request ends once, nothing leaks, and the same seed is the same story."""

from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.core.request import Priority
from penstock.core.slo import Slo
from penstock.router.strategies import STRATEGIES, RoutingSettings, StrategyName
from penstock.sim.cost import StepCost
from penstock.sim.flight import Ask, Flight
from penstock.sim.oracle import best_place
from penstock.sim.profile import Profile
from penstock.sim.simulation import Simulation
from penstock.sim.workload import replay, speed_for
from penstock.workload.trace import Arrival

pytestmark = pytest.mark.slow

COST = StepCost(step_s=2e-3, weights_s=4e-3, token_s=25e-6, pair_s=1e-9, context_s=30e-9)
PROFILE = Profile(
    "small",
    COST,
    kv_tokens=50_000,
    max_sequences=16,
    chunk_tokens=2048,
    max_context_tokens=20_000,
    slo=Slo(ttft_s=1.0, tpot_s=0.05),
)


def crowd(count: int, every_s: float = 0.05) -> list[Ask]:
    """Ten conversations that take turns, each turn with all before it."""
    asks = []
    for i in range(count):
        talk, turn = i % 10, i // 10 % 6
        names = tuple(1000 * talk + n for n in range(turn + 1))
        asks.append(Ask(i * every_s, 512 * (turn + 1) + 40, 20 + i % 30, names, f"s{talk}"))
    return asks


def asks() -> st.SearchStrategy[list[Ask]]:
    one = st.builds(
        lambda gap, names, tail, output, tenant, priority: Ask(
            gap, 512 * len(names) + tail, output, names, None, tenant, priority
        ),
        st.floats(0.0, 0.3),
        st.sampled_from([(), (1,), (1, 2), (3, 4, 5), (1, 6)]),
        st.integers(1, 3000),
        st.integers(1, 200),
        st.sampled_from(["a", "b"]),
        st.sampled_from(Priority),
    )

    def timed(found: list[Ask]) -> list[Ask]:
        at, placed = 0.0, []
        for ask in found:
            at += ask.at_s
            placed.append(ask._replace(at_s=at))
        return placed

    return st.lists(one, min_size=1, max_size=40).map(timed)


@settings(max_examples=25, deadline=None)
@given(asks(), st.sampled_from([*STRATEGIES, "oracle"]), st.integers(1, 4), st.floats(0.1, 3.0))
def test_every_request_ends_once_and_no_block_is_left(
    asked: list[Ask], policy: StrategyName, num_replicas: int, killed_at: float
) -> None:
    ended: Counter[int] = Counter()

    def note(flight: Flight) -> None:
        ended[flight.number] += 1

    routing = "oracle" if policy == "oracle" else RoutingSettings(policy)  # type: ignore[comparison-overlap]
    sim = Simulation(PROFILE, num_replicas, routing, ended=note)
    if num_replicas > 1 and routing != "oracle":
        sim.events.at(killed_at, sim.kill, "r0")
        sim.events.at(killed_at + 1.0, sim.revive, "r0")
    result = sim.run(asked)
    assert ended == Counter(range(len(asked)))
    assert result.requests == len(asked) == result.answered + sum(result.shed.values())
    assert sim.gateway.num_open == 0
    assert sim.gateway.admission.num_open == 0
    assert sim.gateway.admission.num_waiting("m") == 0
    sim.run_until(sim.events.now + 1.0)
    for replica in sim.replicas.values():
        assert replica.num_open == 0
        assert replica.cache.pool.num_free == replica.cache.pool.num_blocks
        assert not replica.scheduler.has_work


@pytest.mark.parametrize("policy", ["kv_aware", "power_of_two"])
def test_it_is_the_same_every_time(policy: StrategyName) -> None:
    first, second = (Simulation(PROFILE, 3, RoutingSettings(policy)).run(crowd(200)) for _ in range(2))
    assert (first.ttft_s, first.e2e_s, first.loads, first.hit_rate, first.num_events) == (
        second.ttft_s,
        second.e2e_s,
        second.loads,
        second.hit_rate,
        second.num_events,
    )


def test_many_steps_at_once_tell_the_same_story_but_for_the_moment_of_a_report() -> None:
    """A gateway reads amid many steps what they have come to; routing by turns does not look."""
    many, single = (
        Simulation(PROFILE, 3, RoutingSettings("round_robin"), takes_many=takes_many).run(crowd(150))
        for takes_many in (True, False)
    )
    assert many.ttft_s == single.ttft_s
    assert many.e2e_s == single.e2e_s
    assert many.steps == single.steps
    assert many.num_events < single.num_events


def test_what_is_shared_is_found_and_what_is_not_is_not() -> None:
    shared = Simulation(PROFILE, 1).run(crowd(60))
    assert 0.5 < shared.hit_rate < 0.9
    alone = Simulation(PROFILE, 1).run([ask._replace(names=()) for ask in crowd(60)])
    assert alone.hit_rate == 0.0
    assert shared.utilisation < alone.utilisation


def test_an_oracle_finds_at_least_as_much_as_anybody() -> None:
    results = {
        policy: Simulation(PROFILE, 3, "oracle" if policy == "oracle" else RoutingSettings(policy)).run(crowd(240))
        for policy in ("oracle", "kv_aware", "round_robin", "session")
    }
    best = results.pop("oracle").hit_rate
    assert all(best >= other.hit_rate - 0.01 for other in results.values())
    assert results["kv_aware"].hit_rate > 0.9 * best


def test_an_oracle_with_nothing_to_tell_replicas_apart_shares_work_evenly() -> None:
    """Requests that come one by one find everybody idle: no place is better than another, but for its work so far."""
    lonely = [Ask(float(i), 500 + 400 * (i % 5), 10, (i,)) for i in range(60)]
    result = Simulation(PROFILE, 6, "oracle").run(lonely)
    assert result.busiest < 1.15


def test_an_oracle_knows_who_is_busy_with_long_answers() -> None:
    """A replica that has only answers to go on with has no queue of prompts, and is slower for a newcomer."""
    answering = [Ask(0.001 * i, 2000, 2000) for i in range(8)]
    sim = Simulation(PROFILE, 2, "oracle")
    for ask in answering:
        sim.gateway.place(ask, "r0")
    sim.run_until(5.0)
    assert sim.replicas["r0"].queued_tokens == 0
    assert best_place(Ask(5.0, 100, 100), 99, sim.replicas.values()) == "r1"


def test_overload_is_refused_and_counted() -> None:
    flood = [Ask(i * 0.001, 3000, 300) for i in range(1500)]
    result = Simulation(PROFILE, 1).run(flood)
    assert result.shed
    assert result.answered + sum(result.shed.values()) == 1500
    assert result.kept_slo < 0.5


def test_memory_does_not_grow_with_requests() -> None:
    sim = Simulation(PROFILE, 2)
    sim.run(crowd(400, every_s=0.1))
    assert not sim.gateway._flights
    assert all(not followed.riders for followed in sim.gateway.followed.values())
    assert sim.gateway.index.num_hashes <= 2 * PROFILE.kv_tokens / 256


def test_copies_of_a_trace_share_nothing_and_come_in_order() -> None:
    trace = [Arrival(float(i), 600, 5, (i % 3,), f"s{i % 3}") for i in range(30)]
    asked = list(replay(trace, 2.0, copies=3))
    assert len(asked) == 90
    assert [ask.at_s for ask in asked] == sorted(ask.at_s for ask in asked)
    assert len({name for ask in asked for name in ask.names}) == 9
    assert len({ask.session for ask in asked}) == 9
    assert asked[-1].at_s <= 16.0


def test_tenants_and_classes_are_those_of_a_session() -> None:
    trace = [Arrival(float(i), 600, 5, (i % 40,), f"s{i % 40}") for i in range(200)]
    asked = list(replay(trace, tenants=4, classes={Priority.HIGH: 1.0, Priority.LOW: 1.0}))
    assert {ask.tenant for ask in asked} == {"t0", "t1", "t2", "t3"}
    assert {ask.priority for ask in asked} == {Priority.HIGH, Priority.LOW}
    owners = {(ask.session, ask.tenant, ask.priority) for ask in asked}
    assert len(owners) == 40


def test_a_speed_makes_the_utilisation_that_was_asked_for() -> None:
    trace = [Arrival(i * 0.5, 1000 + 10 * (i % 7), 50) for i in range(300)]
    speed = speed_for(trace, PROFILE, 2, 0.5)
    result = Simulation(PROFILE, 2).run(replay(trace, speed))
    assert result.utilisation == pytest.approx(0.5, rel=0.1)


def test_a_host_tier_is_worth_most_to_a_router_that_hears_of_it() -> None:
    """Forty conversations of four turns: each replica's device has room for a few, and its host for all."""
    talks = [
        Ask((40 * turn + talk) * 0.05, 1024 * (turn + 1) + 40, 4, tuple(100 * talk + n for n in range(2 * turn + 2)))
        for turn in range(4)
        for talk in range(40)
    ]
    small = replace(PROFILE, kv_tokens=12_288)
    tiered = replace(small, host_kv_tokens=400_000)
    alone, blind, hearing = (
        Simulation(profile, 4, RoutingSettings(policy)).run(talks).hit_rate
        for profile, policy in ((small, "kv_aware"), (tiered, "token_aware"), (tiered, "kv_aware"))
    )
    assert alone < blind < hearing
    assert hearing > 0.55  # all but each one's first turn, and what comes new in each, are 0.6
