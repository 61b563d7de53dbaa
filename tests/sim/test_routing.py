"""Routing by prefixes on small fleets: hot prefixes are spread, no replica is idle, and load alone beats turns."""

import random

import pytest

from penstock.core.slo import Slo
from penstock.router.strategies import RoutingSettings, StrategyName
from penstock.sim.cost import StepCost
from penstock.sim.flight import Ask
from penstock.sim.profile import Profile
from penstock.sim.result import Result
from penstock.sim.simulation import Simulation

COST = StepCost(step_s=2e-3, weights_s=4e-3, token_s=25e-6, pair_s=1e-9, context_s=100e-9)
PROFILE = Profile("small", COST, kv_tokens=100_000, max_sequences=32, chunk_tokens=2048, slo=Slo(1.0, tpot_s=0.05))
BLOCKS = 8  # of 512 tokens, in a shared prefix


def asked(count: int, per_s: float, prefixes: int, seed: int, own: int = 300, output: int = 60) -> list[Ask]:
    """Arrivals by chance; each prompt begins with one of so many prefixes, the first the hottest, or with none."""
    rng, at_s, asks = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(per_s)
        names: tuple[int, ...] = ()
        if prefixes:
            chosen = rng.choices(range(prefixes), [1.0 / (1 + i) for i in range(prefixes)])[0]
            names = tuple(range(BLOCKS * chosen, BLOCKS * (chosen + 1)))
        tokens = 512 * len(names) + round(own * rng.uniform(0.5, 1.5))
        asks.append(Ask(at_s, tokens, round(output * rng.uniform(0.5, 1.5)), names))
    return asks


def simulated(policy: StrategyName, num_replicas: int, asks: list[Ask]) -> Result:
    return Simulation(PROFILE, num_replicas, RoutingSettings(policy)).run(asks)


def ttft_p95_s(result: Result) -> float:
    return result.ttft_s.p95 or 0.0


def tpot_p95_s(result: Result) -> float:
    return result.tpot_s.p95 or 0.0


def mean_e2e_s(result: Result) -> float:
    return result.e2e_s.mean or 0.0


@pytest.mark.slow
def test_few_hot_prefixes_are_spread_over_the_fleet() -> None:
    asks = asked(600, 60.0, prefixes=3, seed=1)
    found, turns = simulated("kv_aware", 8, asks), simulated("round_robin", 8, asks)
    assert found.busiest < 1.5
    assert found.hit_rate >= turns.hit_rate


def test_at_very_low_load_every_replica_gets_a_prefix() -> None:
    """Requests find all replicas idle: a known prefix goes home, and a new one to the replica that has worked least."""
    result = simulated("kv_aware", 8, asked(100, 0.5, prefixes=12, seed=2))
    assert result.loads[-1] > 0.0
    assert result.hit_rate > 0.7


@pytest.mark.slow
def test_without_shared_prefixes_it_is_not_behind_round_robin() -> None:
    """Several seeds are taken together: one alone differs by a per cent or two by chance."""
    found, turns = [], []
    for seed in range(3):
        asks = asked(300, 40.0, prefixes=0, seed=seed, own=1500)
        found.append(simulated("kv_aware", 4, asks))
        turns.append(simulated("round_robin", 4, asks))
    for measured in (ttft_p95_s, tpot_p95_s, mean_e2e_s):
        assert sum(map(measured, found)) < 1.01 * sum(map(measured, turns)), measured
