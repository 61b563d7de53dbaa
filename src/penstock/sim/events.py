"""The events of a simulation: a heap of calls by their time. Time moves only when one is taken out."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0  # among calls of the same moment the first one made is the first one taken

    def at(self, when: float, call: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + seconds, call, *arguments)

    def step(self) -> bool:
        """The next call; False: there is none."""
        if not self._heap:
            return False
        self.now, _, call, arguments = heapq.heappop(self._heap)
        call(*arguments)
        return True

    def run_until(self, when: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= when:
            self.step()
        self.now = max(self.now, when)
