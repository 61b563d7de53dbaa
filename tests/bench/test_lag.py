from __future__ import annotations

import asyncio
import time

from penstock.bench.lag import TICK_S, LagWatch


async def test_a_pause_counts_for_every_tick_that_it_swallowed() -> None:
    watch = LagWatch()
    watch.start()
    await asyncio.sleep(2 * TICK_S)
    time.sleep(0.3)  # noqa: ASYNC251 - that is the point
    await asyncio.sleep(2 * TICK_S)
    health = watch.stop([])
    assert health.lag is not None
    assert health.lag.most >= 0.3 - 2 * TICK_S
    assert health.lag.mean >= 0.1  # as a chunk would have been late that came at any time
    assert health.send_delay is None
    assert 0 <= health.cpu < 1.5
