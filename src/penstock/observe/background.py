"""Work that goes on beside requests, in threads and tasks: it outlives its errors, and a death is noticed.

The body of every such loop stands in `outliving(NAME)`: an unexpected error is logged, counted and over, and the loop
goes on. What ends all the same (an error in the loop itself) is in `dead()`, as long as nobody has stopped it, and a
gateway with one of these is not ready. Counts are of the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

log = logging.getLogger(__name__)

_lock = threading.Lock()
_errors: Counter[str] = Counter()
_workers: WeakSet[Worker] = WeakSet()


class Worker:
    """One thread or task, from its start to `stop`; whoever started it keeps this."""

    def __init__(self, name: str, is_alive: Callable[[], bool]) -> None:
        self.name = name
        self.is_alive = is_alive
        with _lock:
            _workers.add(self)

    @classmethod
    def of_task(cls, name: str, task: asyncio.Task[None]) -> Worker:
        """A cancelled task was stopped, and has not died."""
        return cls(name, lambda: not task.done() or task.cancelled())

    def stop(self) -> None:
        """The work may end from now on."""
        with _lock:
            _workers.discard(self)


@contextmanager
def outliving(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the outermost loop of a thread or task: nobody else could do anything about it
        count_error(name, error)


def count_error(name: str, error: Exception) -> None:
    with _lock:
        _errors[name] += 1
        count = _errors[name]
    if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th …: one that comes each half second must not fill a disk
        log.error("%s: unexpected error, the %d. of this process; it goes on", name, count, exc_info=error)


def errors() -> dict[str, int]:
    """Returns how often each kind of work has met an error that nobody expected."""
    with _lock:
        return dict(_errors)


def dead() -> list[str]:
    """Names of the threads and tasks that have ended and should not have."""
    with _lock:
        workers = list(_workers)
    return sorted({worker.name for worker in workers if not worker.is_alive()})
