"""Places kept for requests that were refused and told when to come back. Without them a Retry-After is a guess: under
lasting overload whoever arrives by chance would take the place of the one who waited as told."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from penstock.core.request import Priority

Key = tuple[Priority, str, int]  # class, tenant and fingerprint


@dataclass(slots=True)
class Promise:
    key: Key
    due: float
    cost: int
    is_over: bool = False


class Promises:
    def __init__(self, most: int, grace_s: float) -> None:
        self._most = most
        self._grace_s = grace_s
        self._by_key: dict[Key, deque[Promise]] = {}
        self._by_due: list[tuple[float, int, Promise]] = []
        self._made = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def make(self, key: Key, due: float, cost: int) -> bool:
        if self._count >= self._most:
            return False
        promise = Promise(key, due, cost)
        self._made += 1
        self._count += 1
        self._by_key.setdefault(key, deque()).append(promise)
        heapq.heappush(self._by_due, (due, self._made, promise))
        return True

    def find(self, key: Key) -> Promise | None:
        """The one that is due first."""
        if not self._count:
            return None
        kept = self._by_key.get(key)
        return min(kept, key=lambda promise: promise.due) if kept else None

    def end(self, promise: Promise) -> None:
        promise.is_over = True
        self._count -= 1
        kept = self._by_key[promise.key]
        kept.remove(promise)
        if not kept:
            del self._by_key[promise.key]

    def expire(self, now: float) -> list[Promise]:
        """Those nobody came for."""
        expired = []
        while self._by_due and (self._by_due[0][2].is_over or self._by_due[0][0] + self._grace_s < now):
            promise = heapq.heappop(self._by_due)[2]
            if not promise.is_over:
                self.end(promise)
                expired.append(promise)
        return expired
