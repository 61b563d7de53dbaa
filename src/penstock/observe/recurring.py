"""A thread that does one thing again and again, and once more when it is told to stop. It knows no event loop."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Recurring(ABC):
    """From `start` to `close`, or as a context."""

    def __init__(self, name: str, every_s: float) -> None:
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def tick(self) -> None:
        """In the thread; the last time in whoever closes it."""

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """What is left is done first."""
        self._stopping.set()
        self._thread.join()
        self.tick()

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self.tick()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
