"""Sequences that wait: a first-come line per class and tenant, and the order in which they may leave.

Resumed streams have a line of their own, the one with fewest tokens first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from penstock.core.request import Priority, Request
from penstock.sched.ranking import Ranking
from penstock.sched.sequence import Sequence

_Line = tuple[Priority, str, bool]  # class, tenant, whether its streams are resumed


def _line_of(request: Request) -> _Line:
    return request.priority, request.tenant, request.is_resumed


def _by_arrival(sequence: Sequence) -> int:
    return sequence.order


def _by_size(sequence: Sequence) -> tuple[int, int]:
    return sequence.num_known_elsewhere, sequence.order


class WaitingQueue:
    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._lines: dict[_Line, list[Sequence]] = {}
        self._length = 0
        self.num_tokens = 0  # of all who wait, counted as they came in
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return self._length

    @property
    def has_resumed(self) -> bool:
        return any(is_resumed for _, _, is_resumed in self._lines)

    def add(self, sequence: Sequence) -> None:
        """Inserts it into its line by arrival, so one that was preempted goes back to the place it came from."""
        request = sequence.request
        line = self._lines.setdefault(_line_of(request), [])
        insort(line, sequence, key=_by_size if request.is_resumed else _by_arrival)
        self._length += 1
        self._tokens[request.id] = len(sequence.token_ids)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        request = sequence.request
        line = self._lines[_line_of(request)]
        line.remove(sequence)
        if not line:
            del self._lines[_line_of(request)]
        self._length -= 1
        self.num_tokens -= self._tokens.pop(request.id)

    def first(self, count: int, now: float) -> Iterator[Sequence]:
        """Yields up to `count` sequences of each tenant, best rank first. Ranks are read when the next one is asked
        for: a tenant that was let in meanwhile has had a turn."""
        rank = self._ranking.rank
        lines = [line[count - 1 :: -1] for line in self._lines.values()]  # last first
        heads = [(rank(line[-1], now), line) for line in lines]
        heapify(heads)
        left = count * len({tenant for _, tenant, _ in self._lines})
        while heads and left:
            known, line = heads[0]
            if rank(line[-1], now) > known:  # its tenant has had a turn since
                heapreplace(heads, (rank(line[-1], now), line))
                continue
            yield line.pop()
            left -= 1
            if line:
                heapreplace(heads, (rank(line[-1], now), line))
            else:
                heappop(heads)
