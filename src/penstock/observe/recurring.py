"""A thread that does one thing again and again, and once more when it is told to stop. It knows no event loop.

An error that `tick` did not expect is counted (`background`), and the next tick comes as if there had been none."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from penstock.observe.background import Worker, outliving


class Recurring(ABC):
    """Work that a thread repeats, from `start` to `close`, or as a context."""

    def __init__(self, name: str, every_s: float) -> None:
        self._name = name
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._worker: Worker | None = None

    @abstractmethod
    def tick(self) -> None:
        """Does the work once: in the thread, and the last time in whoever closes it."""

    def start(self) -> Self:
        self._thread.start()
        self._worker = Worker(self._name, self._thread.is_alive)
        return self

    def close(self) -> None:
        """Stops the thread and does what is left."""
        if self._worker is not None:
            self._worker.stop()
        self._stopping.set()
        self._thread.join()
        with outliving(self._name):
            self.tick()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            with outliving(self._name):
                self.tick()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
