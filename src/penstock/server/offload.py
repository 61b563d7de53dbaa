"""Work that grows with a request's size, off the event loop: parsing, templates, tokenizing, writing large answers.

Small work is done on the spot: a thread takes longer to wake up. Large work has threads of its own, few of them,
because a tokenizer takes up to 300 bytes of memory per byte of text while it works; what it took is given back to the
operating system afterwards. A thread cannot be stopped, so the time limit frees the client and not the thread: what
still runs keeps its place until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from penstock.core.errors import Overloaded
from penstock.core.memory import trimming

T = TypeVar("T")

INLINE_BYTES = 4 << 10
LARGE_BYTES = 256 << 10
HUGE_BYTES = 2 << 20
_MAX_WAITING = 16  # in a lane, with what runs there; beyond it requests are refused
_MAX_S = 30.0  # from the moment it is asked for


class _Lane:
    """Threads of their own for work of one size, so that huge requests do not keep large ones waiting."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize-large")
        self.num_open = 0

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        if self.num_open >= _MAX_WAITING:
            raise Overloaded("too many large requests are being read", retry_after_s=1.0)
        loop, submitted = asyncio.get_running_loop(), self.pool.submit(trimming, work)
        self.num_open += 1
        submitted.add_done_callback(lambda _: self._end_in(loop))
        return asyncio.wrap_future(submitted)

    def _end_in(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the server has stopped meanwhile
            loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self.num_open -= 1


class Offload:
    def __init__(self, pool: Executor, *, max_s: float = _MAX_S) -> None:
        self._pool = pool
        self._large, self._huge = _Lane(2), _Lane(1)
        self._max_s = max_s

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which costs what reading so many bytes costs. Raises Overloaded where too much is
        waiting, and where it takes too long."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if num_bytes <= LARGE_BYTES:
            running: asyncio.Future[T] = asyncio.get_running_loop().run_in_executor(self._pool, work)
        else:
            running = (self._large if num_bytes <= HUGE_BYTES else self._huge).submit(work)
        try:
            return await asyncio.wait_for(running, self._max_s)
        except TimeoutError:
            raise Overloaded("the request could not be read in time", retry_after_s=1.0) from None

    async def write(self, num_bytes: int, work: Callable[[], bytes]) -> bytes:
        """An answer of so many bytes. It is paid for by now, so it is never refused."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
