"""Microseconds for a pick, hashing included and tokenization not, and for what else a request pays the router.

And the bytes that its index takes for a block, on a device and in host memory.

python -m tools.routing.speed
"""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from timeit import repeat

from msgspec.structs import replace

from penstock.core.hashing import routing_hashes
from penstock.core.measurements import EngineLoad
from penstock.core.replica import UNKNOWN_LIMITS, ReplicaSnapshot
from penstock.gateway.records.decision_log import DecisionLog
from penstock.router.explanation import route_header
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import EdgeRequest
from penstock.router.router import Router


def micros(action: Callable[[], object], times: int) -> float:
    return min(repeat(action, number=times, repeat=7)) / times * 1e6


def replicas(count: int) -> list[ReplicaSnapshot]:
    return [
        ReplicaSnapshot(
            id=f"http://10.0.{i // 250}.{i % 250}:9000",
            models=("m",),
            limits=replace(UNKNOWN_LIMITS, kv_capacity_tokens=400_000),
            load=EngineLoad(num_running=i % 20, queued_tokens=i * 37 % 500, kv_active_tokens=i * 100),
        )
        for i in range(count)
    ]


def whole_pick(
    prompt: int, fleet: list[ReplicaSnapshot], num_holders: int, *, on_host: bool = False
) -> tuple[float, float]:
    """Returns the times of hashing, and of hashing and picking. Each of the holders has another length of the prompt's
    beginning, with `on_host` half of it in host memory."""
    ids = [i * 7919 % 50_000 for i in range(prompt)]
    router, hashes = Router(), routing_hashes("acme", ids)
    for i, replica in enumerate(fleet):
        held = hashes[: 1 + i % len(hashes)] if i < num_holders else []
        router.index.reset(replica.id, held)
        if on_host:
            router.index.stored_on_host(replica.id, held[len(held) // 2 :])

    def pick() -> object:
        chain = tuple(routing_hashes("acme", ids))
        return router.pick(EdgeRequest("q", "m", prompt, 200, hashes=chain, expected_output=100), fleet, 0.0)

    times = max(5, 2000 // len(fleet))
    return micros(lambda: routing_hashes("acme", ids), times), micros(pick, times)


def block_bytes(num_replicas: int, *, on_host: bool, num_blocks: int = 8192) -> float:
    """Each replica has blocks of its own."""
    index = PrefixIndex()
    tracemalloc.start()
    for i, replica in enumerate(replicas(num_replicas)):
        index.reset(replica.id, ())
        hashes = routing_hashes(replica.id, [i] * (256 * num_blocks))
        (index.stored_on_host if on_host else index.stored)(replica.id, hashes)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / (num_replicas * num_blocks)


def main() -> None:
    print(f"{'prompt':>7} {'replicas':>8} {'holders':>8} {'hashing':>9} {'all':>9} {'on host':>9}   µs")
    for prompt in (8192, 32_768):
        for count in (4, 100, 1000):
            for num_holders in (0, 1, count):
                hashing, both = whole_pick(prompt, replicas(count), num_holders)
                _, hosted = whole_pick(prompt, replicas(count), num_holders, on_host=True)
                print(f"{prompt:7} {count:8} {num_holders:8} {hashing:9.1f} {both:9.1f} {hosted:9.1f}")
    few = replicas(4)
    router, request = Router(), EdgeRequest("q", "m", 1000, 200, expected_output=100)
    choice = router.pick(request, few, 0.0)
    print(f"a pick among 4 without hashes {micros(lambda: router.pick(request, few, 0.0), 2000):.2f} µs")
    print(f"the header                    {micros(lambda: route_header(choice), 2000):.2f} µs")
    with tempfile.TemporaryDirectory() as folder, DecisionLog(Path(folder) / "d") as log:
        print(f"the decision log, on the loop {micros(lambda: log.decided(request, choice, 0.0), 500):.2f} µs")
    for count in (4, 20, 100):
        here, there = (block_bytes(count, on_host=on_host) for on_host in (False, True))
        print(f"a block of one of {count:3} replicas {here:6.0f} bytes, in host memory {there:6.0f}")


if __name__ == "__main__":
    main()
