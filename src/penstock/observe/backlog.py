"""What the event loop has to say and a thread writes down, a few times a second and many at a time.

Saying it costs an append: nothing is put into words before the thread does it, and no request waits for a disk or for
whoever reads. What cannot be written, or comes faster than it can be, is lost, and counted.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from types import TracebackType
from typing import Generic, Self, TypeVar

_INTERVAL_S = 0.2

log = logging.getLogger(__name__)
T = TypeVar("T")


class Backlog(ABC, Generic[T]):
    """`put` belongs to the event loop. From `start` to `close`, or as a context."""

    def __init__(self, name: str, *, most: int, batch: int) -> None:
        """`most` may wait; after each `batch` the event loop's thread gets its turn."""
        self._name = name
        self._most = most
        self._batch = batch
        self._waiting: deque[T] = deque()
        self._num_dropped = 0  # by the event loop
        self._num_failed = 0  # by the thread
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def write(self, batch: list[T]) -> None:
        """In the thread. What raises OSError is lost."""

    @property
    def num_lost(self) -> int:
        return self._num_dropped + self._num_failed

    def put(self, one: T) -> None:
        if len(self._waiting) < self._most:
            self._waiting.append(one)
        else:
            self._num_dropped += 1

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """What waits is written first."""
        self._stopping.set()
        self._thread.join()
        self._write_all()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            self._write_all()

    def _write_all(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            try:
                self.write(batch)
            except OSError as error:
                if not self._num_failed:
                    log.error("the %s cannot be written: %s", self._name, error)
                self._num_failed += len(batch)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
