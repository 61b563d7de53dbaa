"""A request that is over is freed at once: the collector looks rarely, and bodies are large."""

from __future__ import annotations

import asyncio
import gc

from tools.gateway_calls import TURNS, Bench

from penstock.gateway.proxy.proxied_request import ProxiedRequest
from penstock.gateway.proxy.upstream_request import UpstreamRequest


def num_held() -> int:
    return sum(isinstance(one, ProxiedRequest | UpstreamRequest) for one in gc.get_objects())


async def test_answered_requests_leave_no_cycle_for_the_collector() -> None:
    bench = Bench()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert bench.is_ready
    gc.collect()
    gc.disable()
    try:
        before = num_held()
        for stream in (False, True):
            bench.run(bench.exchange(0, stream=stream), stream=stream)
        assert num_held() == before
    finally:
        gc.enable()
        bench.gateway.close()
