"""Contents of an engine's cache, as far as the engine has said: routing hashes, where each is, and how it came to be.

Every change has a number, so that a reader who knows the contents as they were at one number is told the difference.
The history is kept only while it is shorter than the contents themselves: a reader who asks for more is better off with
those. Each life of the engine's process is a history of its own, with its own name.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

_SHORT = 1024  # hashes; a history up to here is kept whatever the contents' size


class Difference(NamedTuple):
    """Routing hashes, by where they are now."""

    stored: Sequence[int]  # on the device
    removed: Sequence[int]
    on_host: Sequence[int]  # part of it on the host only

    @property
    def size(self) -> int:
        return sum(map(len, self))


class CacheContents:
    def __init__(self) -> None:
        self.boot = ""
        self.begin(0)

    def begin(self, size: int) -> None:
        """A new process, with an empty cache. `size` is that of a routing block; 0: it says nothing of its cache."""
        self.boot = uuid.uuid4().hex
        self.size = size
        self.seq = 0
        self.hashes: dict[int, None] = {}  # on the device; a set, in the order in which they came
        self.on_host: dict[int, None] = {}  # as that
        self._history: deque[Difference] = deque()  # the last one has the number `seq`
        self._history_size = 0

    def take(self, stored: Sequence[int], removed: Sequence[int], on_host: Sequence[int] = ()) -> None:
        for routing_hash in (*removed, *on_host):
            self.hashes.pop(routing_hash, None)
        for routing_hash in (*removed, *stored) if self.on_host else ():
            self.on_host.pop(routing_hash, None)
        self.hashes.update(dict.fromkeys(stored))
        self.on_host.update(dict.fromkeys(on_host))
        change = Difference(stored, removed, on_host)
        self.seq += 1
        self._history.append(change)
        self._history_size += change.size
        while self._history_size > max(_SHORT, len(self.hashes) + len(self.on_host)):
            self._history_size -= self._history.popleft().size

    def since(self, seq: int) -> Difference | None:
        """Difference since the change `seq`, each hash once; None: that is too long ago."""
        missed = self.seq - seq
        if not 0 <= missed <= len(self._history):
            return None
        touched: dict[int, None] = {}
        for change in islice(self._history, len(self._history) - missed, None):
            for hashes in change:
                touched.update(dict.fromkeys(hashes))
        here, host = self.hashes, self.on_host
        return Difference(
            [one for one in touched if one in here],
            [one for one in touched if one not in here and one not in host],
            [one for one in touched if one in host],
        )
