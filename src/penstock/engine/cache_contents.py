"""What an engine's cache holds, as far as the engine has said: a set of routing hashes, and how it came to be.

Every change has a number, so that a reader who knows the set as it was at one number is told the difference. The
history is kept only while it is shorter than the set itself: who asks for more is better off with the set. Each life of
the engine's process is a history of its own, with its own name.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

_SHORT = 1024  # hashes; a history up to here is kept whatever the set's size


class _Change(NamedTuple):
    stored: Sequence[int]
    removed: Sequence[int]

    @property
    def size(self) -> int:
        return len(self.stored) + len(self.removed)


class CacheContents:
    def __init__(self) -> None:
        self.boot = ""
        self.begin(0)

    def begin(self, size: int) -> None:
        """A new process, with an empty cache. `size` is that of a routing block; 0: it says nothing of its cache."""
        self.boot = uuid.uuid4().hex
        self.size = size
        self.seq = 0
        self.hashes: dict[int, None] = {}  # a set, in the order in which they came
        self._history: deque[_Change] = deque()  # the last one has the number `seq`
        self._history_size = 0

    def take(self, stored: Sequence[int], removed: Sequence[int]) -> None:
        for routing_hash in removed:
            self.hashes.pop(routing_hash, None)
        self.hashes.update(dict.fromkeys(stored))
        self.seq += 1
        change = _Change(stored, removed)
        self._history.append(change)
        self._history_size += change.size
        while self._history_size > max(_SHORT, len(self.hashes)):
            self._history_size -= self._history.popleft().size

    def since(self, seq: int) -> tuple[list[int], list[int]] | None:
        """Stored and removed after the change `seq`, each hash once; None: that is too long ago."""
        missed = self.seq - seq
        if not 0 <= missed <= len(self._history):
            return None
        latest: dict[int, bool] = {}
        for change in islice(self._history, len(self._history) - missed, None):
            latest.update(dict.fromkeys(change.removed, False))
            latest.update(dict.fromkeys(change.stored, True))
        return [h for h, is_held in latest.items() if is_held], [h for h, is_held in latest.items() if not is_held]
