from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.loop_pauses import Pauses, watched, without_pauses
from tests.waiting import GIVE_UP_S

MUCH = 5_000_000  # 0.2 s on a processor of the usual speed: four times what is a pause


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def work(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def count(number: int) -> None:
    """Work that takes as many times longer as the processor is slower, which is what a pause is measured against."""
    total = 0
    for each in range(number):
        total += each & 7


@pytest.mark.parametrize("pause", [lambda: work(0.05), lambda: sum(range(2_500_000))])
def test_a_callback_that_works_for_long_is_a_pause(
    loop: asyncio.AbstractEventLoop, pause: Callable[[], object]
) -> None:
    """Also where it is one call that lets no other thread run."""

    async def busy() -> None:
        pause()

    with watched(loop) as pauses:
        asyncio.run_coroutine_threadsafe(busy(), loop).result(GIVE_UP_S)
    with pytest.raises(AssertionError, match="stood still"):
        pauses.check(max_s=0.005)


def test_work_in_another_thread_is_none(loop: asyncio.AbstractEventLoop) -> None:
    async def elsewhere() -> None:
        await loop.run_in_executor(None, work, 0.1)

    with watched(loop) as pauses:
        asyncio.run_coroutine_threadsafe(elsewhere(), loop).result(GIVE_UP_S)
    pauses.check()


def test_a_loop_that_nobody_watched_is_not_called_quick() -> None:
    with pytest.raises(AssertionError, match="nobody"):
        Pauses().check()


def test_an_act_that_holds_a_loop_up_does_so_every_time(loop: asyncio.AbstractEventLoop) -> None:
    counts = [MUCH, 0, MUCH, MUCH, MUCH, 0]  # one after the other

    def act() -> None:
        asyncio.run_coroutine_threadsafe(busy(), loop).result(GIVE_UP_S)

    async def busy() -> None:
        count(counts.pop(0))

    without_pauses(loop, act)
    with pytest.raises(AssertionError, match="stood still"):
        without_pauses(loop, act)
    assert counts == [0]
