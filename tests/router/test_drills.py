"""The router and admission as they are, in front of simulated replicas with prefix caches, on a manual clock."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.core.request import Priority
from penstock.router.strategies import RoutingSettings, StrategyName
from penstock.sim.cost import StepCost
from penstock.sim.flight import Ask, Flight
from penstock.sim.profile import Profile
from penstock.sim.result import Result
from penstock.sim.simulation import Simulation
from penstock.sim.workload import replay
from penstock.workload.trace import read_trace

TRACE = Path(__file__).parent / "data" / "mooncake_conversation_1200.jsonl.xz"
HOT = tuple(range(1, 9))  # 4,096 tokens that many prompts begin with

# About 20,000 prompt tokens a second.
COST = StepCost(step_s=0.012, weights_s=0.0, token_s=40e-6, sequence_s=0.1e-3)
PROFILE = Profile("drilled", COST, kv_tokens=1_000_000, max_sequences=128, chunk_tokens=2048, overlaps=False)


class Drill:
    """A fleet, and what became of those who asked it."""

    def __init__(self, num_replicas: int = 4, *, publishes: bool = True) -> None:
        self._flights: dict[int, Flight] = {}
        self._asked = 0
        self.sim = Simulation(PROFILE, num_replicas, publishes=publishes, ended=self._ended)
        self.run = self.sim.run_until

    def _ended(self, flight: Flight) -> None:
        self._flights[flight.number] = flight

    def ask(
        self, at: float, prompt_tokens: int, output: int, names: Sequence[int], priority: Priority = Priority.NORMAL
    ) -> int:
        """In the order of time."""
        self.sim.ask(Ask(at, prompt_tokens, output, tuple(names), None, "", priority))
        self._asked += 1
        return self._asked - 1

    def of(self, numbers: Sequence[int]) -> list[Flight]:
        return [self._flights[number] for number in numbers]

    def prefilled(self) -> list[int]:
        """Prompt tokens that each replica computed."""
        counters = [replica.scheduler.counters for replica in self.sim.replicas.values()]
        return [counter.prompt_tokens - counter.cached_tokens for counter in counters]


def ttft_s(flight: Flight) -> float:
    assert flight.first_s is not None
    return flight.first_s - flight.ask.at_s


def burst(drill: Drill, count: int, at: float, first: int = 0, own: int = 2) -> list[int]:
    """Prompts with the same beginning and `own` blocks of 512 tokens each that nobody else has."""
    tokens = (len(HOT) + own) * 512 + 10
    starts = [10_000 + (first + i) * own for i in range(count)]
    return [drill.ask(at, tokens, 50, (*HOT, *range(start, start + own))) for start in starts]


def hit_share(flights: list[Flight]) -> float:
    return sum(flight.cached_tokens for flight in flights) / (len(flights) * len(HOT) * 512)


def measure(routing: RoutingSettings, num_replicas: int, speed: float) -> Result:
    return Simulation(PROFILE, num_replicas, routing).run(replay(read_trace(TRACE, 0, 700), speed * num_replicas / 4))


@pytest.mark.parametrize("publishes", [True, False])
def test_a_herd_with_a_hot_prefix_is_spread_and_still_hits(publishes: bool) -> None:
    drill = Drill(publishes=publishes)
    burst(drill, 1, 0.0)  # one replica has it
    drill.run(1.0)
    herd = burst(drill, 100, 1.0, first=1)
    drill.run(30.0)
    computed, flights = drill.prefilled(), drill.of(herd)
    assert max(computed) < 1.3 * sum(computed) / 4
    assert hit_share(flights) > 0.9  # all but the first at each replica
    assert len({flight.replica for flight in flights}) == 4
    ideal_s = sum(flight.ask.prompt_tokens - flight.cached_tokens for flight in flights) / 4 / 20_000
    assert max(map(ttft_s, flights)) < 1.5 * ideal_s + 0.3


def test_a_burst_of_cold_siblings_pays_for_its_beginning_once_for_each_replica_it_needs() -> None:
    drill = Drill()
    siblings = burst(drill, 100, 0.0)
    drill.run(30.0)
    assert hit_share(drill.of(siblings)) > 0.85
    computed = drill.prefilled()
    assert max(computed) < 1.3 * sum(computed) / 4


def test_misses_after_a_hot_prefix_do_not_follow_it() -> None:
    drill = Drill()
    burst(drill, 40, 0.0)
    drill.run(5.0)
    strangers = [drill.ask(5.0 + i * 0.05, 4096, 50, range(50_000 + 8 * i, 50_008 + 8 * i)) for i in range(80)]
    drill.run(20.0)
    counts = Counter(flight.replica for flight in drill.of(strangers))
    assert max(counts.values()) < 1.4 * 20


def test_losing_the_replica_with_the_hot_prefix_costs_one_prefill() -> None:
    drill = Drill()
    first = burst(drill, 1, 0.0)
    drill.run(2.0)
    (holder,) = drill.of(first)
    drill.sim.kill(holder.replica)
    numbers = [number for i in range(10) for number in burst(drill, 1, 2.0 + i * 0.5, first=1 + i)]
    drill.run(10.0)
    flights = drill.of(numbers)
    assert flights[0].cached_tokens == 0
    assert all(flight.cached_tokens >= len(HOT) * 512 for flight in flights[1:])
    assert holder.replica not in {flight.replica for flight in flights}


def test_nobody_starves_behind_the_high_and_the_hot() -> None:
    """Twice what the fleet can do, of which a half is of high priority and shares a prefix: the low come through."""
    drill = Drill(2)
    low, high = [], []
    for i in range(200):
        at = i * 0.05
        high += [drill.ask(at, 4096 + 512, 20, (*HOT, 90_000 + i), Priority.HIGH)]
        low += [drill.ask(at, 2048, 20, range(20_000 + 4 * i, 20_004 + 4 * i), Priority.LOW)]
    drill.run(120.0)
    assert all(flight.first_s is not None for flight in drill.of(high))
    answered = [flight for flight in drill.of(low) if flight.first_s is not None]
    assert len(answered) + sum(bool(flight.shed) for flight in drill.of(low)) == len(low)
    assert len(answered) > 0.9 * len(low)
    assert len({flight.replica for flight in answered}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [4, pytest.param(16, marks=pytest.mark.drill)])
def test_on_a_real_trace_kv_aware_hits_most_and_answers_soonest(num_replicas: int) -> None:
    names: list[StrategyName] = ["kv_aware", "round_robin", "least_connections", "session"]
    results = {name: measure(RoutingSettings(name), num_replicas, speed=2.0) for name in names}
    best = results.pop("kv_aware")
    assert best.busiest < 1.3
    assert best.ttft_s.mean is not None
    assert best.ttft_s.p95 is not None
    for name, other in results.items():
        assert best.hit_rate > 1.3 * other.hit_rate, name
        assert best.ttft_s.mean < 0.95 * (other.ttft_s.mean or 0.0), name
        assert best.ttft_s.p95 < 0.98 * (other.ttft_s.p95 or 0.0), name
