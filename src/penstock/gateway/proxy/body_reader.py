"""Reading of request bodies: at once where they are short, in threads where they are long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.core.errors import Overloaded, PenstockError, RequestAborted
from penstock.core.memory import trimming

_THREADS = 2
LONG_BYTES = 128 << 10
_MAX_AWAY_BYTES = 256 << 20  # of bodies that threads are to read

T = TypeVar("T")

log = logging.getLogger(__name__)


class BodyReader:
    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="count")
        self._away_bytes = 0

    def run(
        self, body: bytes, function: Callable[[], T], then: Callable[[T | None, PenstockError | None], None]
    ) -> None:
        """A function that takes as long as the body is large. `then` is told its result, or what is wrong with the
        request."""
        if len(body) <= LONG_BYTES:
            then(function(), None)
            return
        if self._away_bytes + len(body) > _MAX_AWAY_BYTES:
            raise Overloaded("too many large requests wait to be read", reason="reading", retry_after_s=1.0)
        self._away_bytes += len(body)

        def done(future: asyncio.Future[T]) -> None:
            self._away_bytes -= len(body)
            if future.cancelled():
                then(None, RequestAborted("the gateway is stopping"))
            elif (error := future.exception()) is None:
                then(future.result(), None)
            elif isinstance(error, PenstockError):
                then(None, error)
            else:
                log.error("a request could not be read", exc_info=error)
                then(None, PenstockError("this request could not be read"))

        asyncio.get_running_loop().run_in_executor(self.threads, trimming, function).add_done_callback(done)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
