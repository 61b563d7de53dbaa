"""Sequences that wait: a first-come line per class and tenant, and the order in which they may leave."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from penstock.core.request import Priority
from penstock.sched.ranking import Ranking
from penstock.sched.sequence import Sequence


class WaitingQueue:
    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._lines: dict[tuple[Priority, str], list[Sequence]] = {}
        self._length = 0
        self.num_tokens = 0  # of all who wait, counted as they came in
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return self._length

    def add(self, sequence: Sequence) -> None:
        """Into its line by arrival, so one that was preempted goes back to the place it came from."""
        request = sequence.request
        line = self._lines.setdefault((request.priority, request.tenant), [])
        insort(line, sequence, key=lambda s: s.order)
        self._length += 1
        self._tokens[request.id] = len(sequence.token_ids)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        request = sequence.request
        line = self._lines[request.priority, request.tenant]
        line.remove(sequence)
        if not line:
            del self._lines[request.priority, request.tenant]
        self._length -= 1
        self.num_tokens -= self._tokens.pop(request.id)

    def first(self, count: int, now: float) -> Iterator[Sequence]:
        """Up to `count` sequences of each tenant, best rank first. Ranks are looked at when the next one is asked for:
        who was let in meanwhile has had a turn."""
        rank = self._ranking.rank
        lines = [line[count - 1 :: -1] for line in self._lines.values()]  # last first
        heads = [(rank(line[-1], now), line) for line in lines]
        heapify(heads)
        left = count * len({tenant for _, tenant in self._lines})
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
