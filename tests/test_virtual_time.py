from __future__ import annotations

import asyncio

import pytest

from tests import virtual_time


def test_timers_fire_in_their_order_at_their_times_without_a_wait() -> None:
    async def work() -> list[tuple[str, float]]:
        loop, fired = asyncio.get_running_loop(), []

        async def after(seconds: float, name: str) -> None:
            await asyncio.sleep(seconds)
            fired.append((name, loop.time()))

        await asyncio.gather(after(3600, "hour"), after(60, "minute"), after(0.5, "half"))
        return fired

    assert virtual_time.run(work()) == [("half", 0.5), ("minute", 60.0), ("hour", 3600.0)]


def test_tasks_that_all_wait_for_each_other_are_found_out() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match="every task waits"):
        virtual_time.run(work())
