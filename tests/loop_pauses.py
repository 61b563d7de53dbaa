"""The longest pause of an event loop: how much CPU time its thread spends in one turn, before it gets to a callback
that has just been scheduled. Time in which other processes have the core does not count, so the machine's load does not
matter.

It is measured in the loop itself, by a timer: another thread would miss a call that keeps the interpreter's lock, such
as the decoding of a large body, because it stands still as long as the loop does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from tests.processor import slowness
from tests.waiting import GIVE_UP_S

MAX_PAUSE_S = 0.05  # what a client's request may hold up everybody else's, on a processor of the usual speed
_TRIES = 3
_TICK_EVERY_S = 0.001  # of wall time, so turns before the last one add at most as much to what is measured

T = TypeVar("T")


@dataclass
class Pauses:
    longest_s: float = 0.0  # on a processor of the usual speed
    num_ticks: int = 0
    ticked: asyncio.Event = field(default_factory=asyncio.Event)  # the next time

    def check(self, max_s: float = MAX_PAUSE_S) -> None:
        assert self.num_ticks, "nobody measured"
        assert self.longest_s <= max_s, f"the event loop stood still for {self.longest_s * 1e3:.0f} ms of CPU time"


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[Pauses]:
    """Measures while the block runs. The loop must run in another thread, and be free at the end of the block."""
    pauses = Pauses()
    ticking = asyncio.run_coroutine_threadsafe(_tick(pauses), loop)
    try:
        yield pauses
    finally:
        asyncio.run_coroutine_threadsafe(_measured(pauses), loop).result(GIVE_UP_S)
        ticking.cancel()


def without_pauses(loop: asyncio.AbstractEventLoop, act: Callable[[], T]) -> T:
    """The result of an act that never holds the loop up. It may be tried again: on a processor that is shared with
    neighbours anything takes several times as long now and then, and an act that holds a loop up does so every time."""
    for _ in range(_TRIES):
        with watched(loop) as pauses:
            result = act()
        if pauses.longest_s <= MAX_PAUSE_S:
            break
    pauses.check()
    return result


async def _measured(pauses: Pauses) -> None:
    """Returns when a tick has begun and ended after the block."""
    for _ in range(2):
        await pauses.ticked.wait()


async def _tick(pauses: Pauses) -> None:
    while True:
        began_s = time.thread_time()
        await asyncio.sleep(_TICK_EVERY_S)
        spent_s = time.thread_time() - began_s
        pauses.num_ticks += 1
        pauses.ticked.set()
        pauses.ticked = asyncio.Event()
        if spent_s > pauses.longest_s:
            pauses.longest_s = max(pauses.longest_s, spent_s / max(1.0, slowness()))
