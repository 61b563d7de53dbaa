"""Calls of a store that blocks, in threads, and what is told of them in the event loop. It knows no response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.core.errors import Overloaded, PenstockError, StoreUnavailable

_THREADS = 2
_MAX_PENDING = 512

T = TypeVar("T")

log = logging.getLogger(__name__)


class StoreCalls:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="responses")
        self._num_pending = 0

    def close(self, last: Callable[[], object]) -> None:
        """Waits for all of them, and for this one."""
        self._threads.submit(last)
        self._threads.shutdown(wait=True)

    def run(
        self,
        function: Callable[[], T],
        then: Callable[[T | None, PenstockError | None], None],
        *,
        is_needed: bool = False,
    ) -> None:
        """`then` is told the result, or the error, in the event loop. Raises Overloaded if too many wait, but for what
        is needed."""
        if self._num_pending >= _MAX_PENDING and not is_needed:
            raise Overloaded("too many requests wait for the store of responses", reason="store", retry_after_s=1.0)
        self._num_pending += 1

        def done(future: asyncio.Future[T]) -> None:
            self._num_pending -= 1
            if future.cancelled():
                then(None, StoreUnavailable("the gateway is stopping"))
            elif (error := future.exception()) is None:
                then(future.result(), None)
            elif isinstance(error, PenstockError):
                then(None, error)
            else:
                log.error("the store of responses failed", exc_info=error)
                then(None, StoreUnavailable("the store of responses does not work"))

        asyncio.get_running_loop().run_in_executor(self._threads, function).add_done_callback(done)
