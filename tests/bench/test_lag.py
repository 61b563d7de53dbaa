from __future__ import annotations

import asyncio

import pytest

from penstock.bench.lag import TICK_S, LagWatch
from tests import virtual_time
from tests.virtual_time import SteppedClock, VirtualTimeLoop


def test_a_pause_counts_for_every_tick_that_it_swallowed() -> None:
    async def load() -> None:
        loop, cpu = asyncio.get_running_loop(), SteppedClock()
        assert isinstance(loop, VirtualTimeLoop)
        watch = LagWatch(loop.time, cpu)
        watch.start()
        await asyncio.sleep(10.5 * TICK_S)
        loop.clock.advance(0.3)  # the loop is held up
        cpu.advance(0.1)
        await asyncio.sleep(9 * TICK_S)
        health = watch.stop([])
        assert health.lag is not None
        assert health.lag.most == pytest.approx(0.3 - 0.5 * TICK_S)
        # As a chunk would have been late that came at any time: thirty ticks that were, and twenty or so that were not.
        assert health.lag.mean == pytest.approx(0.3 * 0.295 / 2 / (0.3 + 19.5 * TICK_S), rel=0.1)
        assert health.send_delay is None
        assert health.cpu == pytest.approx(0.1 / (0.3 + 19.5 * TICK_S))

    virtual_time.run(load())
