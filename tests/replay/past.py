"""Decision logs as gateways write them, of traffic that never was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.core.replica import ReplicaSnapshot
from penstock.gateway.records.decisions import Decided, Ended, decided
from penstock.router.load import expected_ttft_s
from penstock.router.request import EdgeRequest
from penstock.router.router import Router
from penstock.router.strategies import RoutingSettings, StrategyName
from tests.snapshots import snapshot

BLOCK = 256
CAPACITY = 100_000


def replica(name: str, **facts: Any) -> ReplicaSnapshot:
    return snapshot(**{"id": name, "models": ("m",), "kv_capacity_tokens": CAPACITY} | facts)


def request(name: str, prompt: int = 1000, chain: Sequence[int] = (), **options: Any) -> EdgeRequest:
    return EdgeRequest(name, "m", prompt, 50, hashes=tuple(chain), block_tokens=BLOCK, **options)


class Past:
    """A router that writes down what it chooses, of replicas that are as they are told."""

    def __init__(self, strategy: StrategyName = "kv_aware", **options: Any) -> None:
        self.router = Router.from_settings(RoutingSettings(strategy, **options), {})

    def choose(self, wanted: EdgeRequest, replicas: Sequence[ReplicaSnapshot], at_s: float) -> Decided:
        replicas = [replace(one, taken_at=at_s - 0.1) for one in replicas]
        choice = self.router.pick(wanted, replicas, at_s)
        self.router.routed(wanted, choice, at_s)
        return decided(at_s, wanted, choice, at_s, "m", "", "")


def ended(choice: Decided, ttft_s: float | None = 0.1, **facts: Any) -> Ended:
    return Ended(choice.id, "ok", choice.picked or "", **{"queue_s": 0.0, "ttft_s": ttft_s} | facts)


def traffic(
    strategy: StrategyName, count: int = 120, *, seed: int = 0, slower: float = 1.0, **options: Any
) -> Iterator[Decided | Ended]:
    """Shared prefixes and random loads. A first token takes `slower` times what the router expects."""
    rng, past, at_s = random.Random(seed), Past(strategy, **options), 1000.0
    for number in range(count):
        at_s += rng.expovariate(1.0)
        replicas = [
            replica(
                f"r{i}",
                num_running=rng.randrange(5),
                queued_tokens=rng.choice([0, 0, 300, 2000]),
                prefill_tokens_per_s=rng.choice([1000.0, 4000.0]),
                kv_active_tokens=rng.randrange(CAPACITY),
            )
            for i in range(rng.randrange(1, 5))
        ]
        family = rng.randrange(4)
        wanted = request(
            f"q{number}",
            rng.randrange(1300, 3000),
            [10 * family + block for block in range(5)],
            random01=rng.random(),
            expected_output=rng.randrange(1, 50),
        )
        choice = past.choose(wanted, replicas, at_s)
        yield choice
        seen = next(one for one in choice.candidates if one.id == choice.picked)
        picked = seen.snapshot("m", at_s)
        took_s = slower * expected_ttft_s(wanted, picked, wanted.tokens_of(seen.matched))
        yield ended(choice, took_s + 0.25, queue_s=0.25)
