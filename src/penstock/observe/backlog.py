"""Entries that the event loop appends and a thread writes down, a few times a second and many at a time.

An entry costs an append: nothing is put into words before the thread does it, and no request waits for a disk or for
whoever reads. One that cannot be written, or comes faster than it can be, is lost, and counted.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from typing import Generic, TypeVar

from penstock.observe.background import count_error
from penstock.observe.recurring import Recurring

_INTERVAL_S = 0.2

log = logging.getLogger(__name__)
T = TypeVar("T")


class Backlog(Recurring, Generic[T]):
    """`put` belongs to the event loop."""

    def __init__(self, name: str, *, most: int, batch: int) -> None:
        """`most` may wait; after each `batch` the event loop's thread gets its turn."""
        super().__init__(name, _INTERVAL_S)
        self._most = most
        self._batch = batch
        self._waiting: deque[T] = deque()
        self._num_dropped = 0  # by the event loop
        self._num_failed = 0  # by the thread

    @abstractmethod
    def write(self, batch: list[T]) -> None:
        """The writing of a batch, in the thread. A batch that raises OSError is lost. Of one that raises anything else,
        each is tried by itself: that one is lost which cannot be written, and the others may be written twice."""

    def passed(self, batch: list[T]) -> None:
        """A hook, called in the thread once for each batch: it is written, or lost."""

    @property
    def num_lost(self) -> int:
        return self._num_dropped + self._num_failed

    def put(self, one: T) -> None:
        if len(self._waiting) < self._most:
            self._waiting.append(one)
        else:
            self._num_dropped += 1

    def tick(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._write(batch)
            self.passed(batch)

    def _write(self, batch: list[T]) -> None:
        try:
            self.write(batch)
        except OSError as error:
            if not self._num_failed:
                log.error("the %s cannot be written: %s", self._name, error)
            self._num_failed += len(batch)
        except Exception as error:  # one of them cannot be put into words
            if len(batch) > 1:
                for one in batch:
                    self._write([one])
            else:
                count_error(self._name, error)
                self._num_failed += 1
