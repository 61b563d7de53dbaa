"""A replay against what it is about: the same traffic, really run under the other policy, by simulated replicas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from tools.routing.replayed import Written

from penstock.replay.replay import Replay
from penstock.replay.report import Report, report
from penstock.router.strategies import RoutingSettings, StrategyName
from penstock.sim.cost import StepCost
from penstock.sim.flight import Ask
from penstock.sim.profile import Profile
from penstock.sim.simulation import Simulation

pytestmark = pytest.mark.slow

OTHERS: tuple[StrategyName, ...] = ("round_robin", "session", "least_connections")
REPLICAS, REQUESTS, BLOCK = 4, 600, 512

# About 20,000 prompt tokens a second.
COST = StepCost(step_s=0.012, weights_s=0.0, token_s=40e-6, sequence_s=0.1e-3)
PROFILE = Profile("replayed", COST, kv_tokens=1_000_000, max_sequences=128, chunk_tokens=2048, overlaps=False)


def asks() -> Iterator[Ask]:
    """Sessions of a few turns, each of which begins with all that was said before."""
    rng, at_s = random.Random(3), 0.0
    turns = dict.fromkeys(range(60), 6)
    for _ in range(REQUESTS):
        at_s += rng.expovariate(7.0)
        number = rng.randrange(60)
        turns[number] = turns[number] + 3 if turns[number] < 30 else 6
        blocks = [1000 * number + block for block in range(turns[number])]
        yield Ask(at_s, BLOCK * len(blocks) + 100, 30, blocks, f"s{number}")


@cache
def really(strategy: StrategyName) -> tuple[float, float]:
    """Share of prompt tokens reused, and mean time to a first token."""
    result = Simulation(PROFILE, REPLICAS, RoutingSettings(strategy)).run(asks())
    assert result.answered == REQUESTS
    assert result.ttft_s.mean is not None
    return result.hit_rate, result.ttft_s.mean


@pytest.fixture(scope="module")
def replayed() -> dict[bool, Report]:
    written = Written()
    Simulation(PROFILE, REPLICAS, RoutingSettings("kv_aware"), chosen=written.chosen, ended=written.ended).run(asks())
    policies = {name: RoutingSettings(name) for name in ("kv_aware", *OTHERS)}
    return {carries: report(Replay(policies, carries=carries).read(written.entries)) for carries in (False, True)}


def test_what_was_done_is_estimated_as_it_was(replayed: dict[bool, Report]) -> None:
    found = replayed[True]
    assert found.estimate.fitted is not None
    assert found.estimate.fitted.explained > 0.8
    assert found.others["kv_aware"].agreement == 1.0


@pytest.mark.parametrize("strategy", OTHERS)
def test_carried_along_it_reuses_what_the_other_policy_reuses(
    replayed: dict[bool, Report], strategy: StrategyName
) -> None:
    """Alone it finds nothing that the other policy would have brought there."""
    tokens = replayed[True].log.prompt_tokens
    reused, _ = really(strategy)
    alone, carried = (replayed[carries].others[strategy].reused_tokens / tokens for carries in (False, True))
    assert carried == pytest.approx(reused, abs=0.12)
    assert abs(carried - reused) < abs(alone - reused) / 2


@pytest.mark.parametrize("strategy", ["round_robin", "least_connections"])
def test_carried_along_it_takes_as_long_as_the_other_policy(
    replayed: dict[bool, Report], strategy: StrategyName
) -> None:
    """Of sessions the log has numbers: they stay together, but at other replicas than they would have."""
    _, ttft_s = really(strategy)
    alone, carried = (replayed[carries].others[strategy].ttft for carries in (False, True))
    assert carried is not None
    assert carried.mean_s == pytest.approx(ttft_s, rel=0.1)
    assert alone is not None
    assert alone.mean_s > 1.2 * ttft_s
