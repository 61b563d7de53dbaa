"""The longest pause of an event loop: how much CPU time its thread spends before it gets to a callback that has just
been scheduled. Time in which other processes have the core does not count, so the machine's load does not matter."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.processor import slowness
from tests.waiting import GIVE_UP_S

MAX_PAUSE_S = 0.05  # what a client's request may hold up everybody else's, on a processor of the usual speed
_PING_EVERY_S = 0.001


@dataclass
class Pauses:
    longest_s: float = 0.0  # on a processor of the usual speed
    num_pings: int = 0

    def check(self, max_s: float = MAX_PAUSE_S) -> None:
        assert self.num_pings, "nobody measured"
        assert self.longest_s <= max_s, f"the event loop stood still for {self.longest_s * 1e3:.0f} ms of CPU time"


@contextmanager
def watched(loop: asyncio.AbstractEventLoop) -> Iterator[Pauses]:
    """Measures while the block runs. The loop must run in another thread, and be free at the end of the block."""
    pauses, is_over = Pauses(), threading.Event()
    clock_id = asyncio.run_coroutine_threadsafe(_clock_id(), loop).result(GIVE_UP_S)

    def ping() -> None:
        while not is_over.wait(_PING_EVERY_S):
            answered = threading.Event()
            spent_s: list[float] = []

            def answer(spent_s: list[float] = spent_s, answered: threading.Event = answered) -> None:
                spent_s.append(time.thread_time())
                answered.set()

            began_s = time.clock_gettime(clock_id)
            loop.call_soon_threadsafe(answer)
            assert answered.wait(GIVE_UP_S), "the event loop does not answer"
            pauses.num_pings += 1
            if spent_s[0] - began_s > pauses.longest_s:
                pauses.longest_s = max(pauses.longest_s, (spent_s[0] - began_s) / max(1.0, slowness()))

    thread = threading.Thread(target=ping, name="loop pauses", daemon=True)
    thread.start()
    try:
        yield pauses
    finally:
        is_over.set()
        thread.join(GIVE_UP_S)


async def _clock_id() -> int:
    return time.pthread_getcpuclockid(threading.get_ident())
