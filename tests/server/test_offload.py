"""Where large work is done, how much of it at a time, and what is told to those who wait for it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.core import memory
from penstock.core.errors import Overloaded
from penstock.server.offload import HUGE_BYTES, INLINE_BYTES, LARGE_BYTES, Offload
from tests.waiting import eventually


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


async def test_small_work_is_done_on_the_spot_and_the_rest_elsewhere(pool: ThreadPoolExecutor) -> None:
    here, off = threading.get_ident(), Offload(pool)
    assert await off.run(INLINE_BYTES, threading.get_ident) == here
    for num_bytes in (INLINE_BYTES + 1, LARGE_BYTES + 1, HUGE_BYTES + 1):
        assert await off.run(num_bytes, threading.get_ident) != here


@pytest.mark.parametrize(("num_bytes", "most"), [(HUGE_BYTES + 1, 1), (LARGE_BYTES + 1, 2)])
async def test_few_large_requests_are_read_at_a_time_and_few_wait(
    pool: ThreadPoolExecutor, num_bytes: int, most: int
) -> None:
    off, may_end = Offload(pool), threading.Event()
    running, longest = list[int](), list[int]()

    def work() -> None:
        running.append(1)
        longest.append(len(running))
        may_end.wait()
        running.pop()

    waiting = [asyncio.ensure_future(off.run(num_bytes, work)) for _ in range(16)]
    await asyncio.to_thread(eventually, lambda: len(running) == most)
    with pytest.raises(Overloaded):
        await off.run(num_bytes, work)
    assert await off.run(LARGE_BYTES, lambda: "small ones go on") == "small ones go on"
    may_end.set()
    await asyncio.gather(*waiting)
    assert max(longest) <= most
    assert await off.run(num_bytes, lambda: "again") == "again"


async def test_who_waits_too_long_is_told(pool: ThreadPoolExecutor) -> None:
    off, may_end = Offload(pool, max_s=0.0), threading.Event()
    for num_bytes in (LARGE_BYTES, HUGE_BYTES):
        with pytest.raises(Overloaded, match="in time"):
            await off.run(num_bytes, may_end.wait)
    may_end.set()


async def test_large_work_that_fails_leaves_nothing_behind_to_be_given_back(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Built:
        pass

    alive, at_trim, own = weakref.WeakSet[Built](), list[int](), set[int]()

    def trim(_: int) -> None:
        if threading.get_ident() in own:  # work of other tests may end only now
            at_trim.append(len(alive))

    monkeypatch.setattr(memory, "_malloc_trim", trim)

    def work() -> None:
        own.add(threading.get_ident())
        built = Built()
        alive.add(built)
        raise OverflowError

    with pytest.raises(OverflowError):
        await Offload(pool).run(HUGE_BYTES, work)
    assert at_trim == [0]


async def test_what_large_work_took_is_given_back(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed, own = list[int](), set[int]()
    monkeypatch.setattr(
        memory, "_malloc_trim", lambda size: trimmed.append(size) if threading.get_ident() in own else None
    )

    def work(text: str) -> int:
        own.add(threading.get_ident())
        return int(text)

    await Offload(pool).run(LARGE_BYTES, lambda: work("1"))
    assert trimmed == []
    with pytest.raises(ValueError, match="bad"):
        await Offload(pool).run(HUGE_BYTES, lambda: work("bad"))
    assert trimmed == [0]
