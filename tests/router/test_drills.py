"""The router and admission as they are, in front of simulated replicas with prefix caches, on a manual clock."""

from collections import Counter
from pathlib import Path

import pytest
from tools.routing.simulation import Job, Simulation
from tools.routing.table import Result, measure

from penstock.core.request import Priority
from penstock.router.strategies import RoutingSettings, StrategyName
from penstock.workload.trace import read_trace

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_1200.jsonl.xz"
HOT = tuple(range(1, 9))  # 4,096 tokens that many prompts begin with


def ttft_s(job: Job) -> float:
    assert job.ttft_s is not None
    return job.ttft_s


def burst(sim: Simulation, count: int, at: float, first: int = 0, own: int = 2) -> list[Job]:
    """Prompts with the same beginning and `own` blocks of 512 tokens each that nobody else has."""
    tokens = (len(HOT) + own) * 512 + 10
    starts = [10_000 + (first + i) * own for i in range(count)]
    return [sim.ask(at, tokens, 50, (*HOT, *range(start, start + own))) for start in starts]


def hit_share(jobs: list[Job]) -> float:
    return sum(job.hit for job in jobs) / (len(jobs) * len(HOT) * 512)


@pytest.mark.parametrize("publishes", [True, False])
def test_a_herd_with_a_hot_prefix_is_spread_and_still_hits(publishes: bool) -> None:
    sim = Simulation(num_replicas=4, publishes=publishes)
    burst(sim, 1, 0.0)  # one replica has it
    sim.run(1.0)
    jobs = burst(sim, 100, 1.0, first=1)
    sim.run(30.0)
    computed = [replica.computed for replica in sim.replicas.values()]
    assert max(computed) < 1.3 * sum(computed) / 4
    assert hit_share(jobs) > 0.9  # all but the first at each replica
    assert len({job.replica for job in jobs}) == 4
    ideal_s = sum(job.request.prompt_tokens - job.hit for job in jobs) / 4 / 20_000
    assert max(map(ttft_s, jobs)) < 1.5 * ideal_s + 0.3


def test_a_burst_of_cold_siblings_pays_for_its_beginning_once_for_each_replica_it_needs() -> None:
    sim = Simulation(num_replicas=4)
    jobs = burst(sim, 100, 0.0)
    sim.run(30.0)
    assert hit_share(jobs) > 0.85
    computed = [replica.computed for replica in sim.replicas.values()]
    assert max(computed) < 1.3 * sum(computed) / 4


def test_misses_after_a_hot_prefix_do_not_follow_it() -> None:
    sim = Simulation(num_replicas=4)
    burst(sim, 40, 0.0)
    sim.run(5.0)
    strangers = [sim.ask(5.0 + i * 0.05, 4096, 50, range(50_000 + 8 * i, 50_008 + 8 * i)) for i in range(80)]
    sim.run(20.0)
    counts = Counter(job.replica for job in strangers)
    assert max(counts.values()) < 1.4 * 20


def test_losing_the_replica_with_the_hot_prefix_costs_one_prefill() -> None:
    sim = Simulation(num_replicas=4)
    (first,) = burst(sim, 1, 0.0)
    sim.run(2.0)
    sim.lose(first.replica)
    jobs = [job for i in range(10) for job in burst(sim, 1, 2.0 + i * 0.5, first=1 + i)]
    sim.run(10.0)
    assert jobs[0].hit == 0
    assert all(job.hit >= len(HOT) * 512 for job in jobs[1:])
    assert first.replica not in {job.replica for job in jobs}


def test_nobody_starves_behind_the_high_and_the_hot() -> None:
    """Twice what the fleet can do, of which a half is of high priority and shares a prefix: the low come through."""
    sim = Simulation(num_replicas=2)
    low, high = [], []
    for i in range(200):
        at = i * 0.05
        high += [sim.ask(at, 4096 + 512, 20, (*HOT, 90_000 + i), priority=Priority.HIGH)]
        low += [sim.ask(at, 2048, 20, range(20_000 + 4 * i, 20_004 + 4 * i), priority=Priority.LOW)]
    sim.run(120.0)
    assert all(job.ttft_s is not None for job in high)
    answered = [job for job in low if job.ttft_s is not None]
    assert len(answered) + sum(job.is_shed for job in low) == len(low)
    assert len(answered) > 0.9 * len(low)
    assert len({job.replica for job in answered}) == 2


@pytest.mark.parametrize("num_replicas", [4, 16])
def test_on_a_real_trace_kv_aware_hits_most_and_answers_soonest(num_replicas: int) -> None:
    rows = read_trace(TRACE, 0, 700)
    names: list[StrategyName] = ["kv_aware", "round_robin", "least_connections", "session"]
    results: dict[str, Result] = {name: measure(rows, RoutingSettings(name), num_replicas, speed=2.0) for name in names}
    best = results.pop("kv_aware")
    assert best.most_over_mean < 1.3
    for name, other in results.items():
        assert best.hit_rate > 1.3 * other.hit_rate, name
        assert best.mean_ttft_s < 0.95 * other.mean_ttft_s, name
        assert best.p95_ttft_s < 0.98 * other.p95_ttft_s, name
