"""A sliding window over fine slots: how much was admitted in the last 60 seconds, exactly, in bounded memory.

Admissions of a tenth of a second share a slot. A slot leaves the window when its newest admission does, so the oldest
slot counts whole as long as any part of it is inside: the count is never less than what was really admitted in any
window that ends now, and more by a tenth of a second's worth at most. What a request did not use is taken off the slot
that it was admitted in. That only lowers counts, so a window that was within its limit stays within it for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.tenancy.limits.quota import MINUTE, US

SLOT = US // 10


class Slot:
    """Requests and tokens that were admitted from `start` on, the last of them at `newest`."""

    __slots__ = ("amounts", "newest", "start")

    def __init__(self, start: int, newest: int, requests: int = 0, tokens: int = 0) -> None:
        self.start = start
        self.newest = newest
        self.amounts = [requests, tokens]

    def last(self, now: int) -> int:
        """The latest time that an admission in this slot can have."""
        return self.newest if now >= self.start + SLOT else self.start + SLOT


class Window:
    """The limit on one kind of amount: a view of slots that the other kind's window sees too."""

    __slots__ = ("_live", "kind", "limit", "used")

    def __init__(self, kind: int, limit: int, slots: Iterable[Slot], now: int) -> None:
        self.kind = kind
        self.limit = limit
        self._live = deque(slots)
        self.used = sum(slot.amounts[kind] for slot in self._live)
        self.advance(now)

    def has_room(self, cost: int) -> bool:
        return not cost or self.used + cost <= self.limit

    def advance(self, now: int) -> None:
        live = self._live
        while live and live[0].newest + MINUTE <= now:
            self.used -= live.popleft().amounts[self.kind]

    def add(self, slot: Slot, amount: int, now: int) -> None:
        """Count more, or less, in a slot. One that has left the window changes nothing here."""
        if slot.newest + MINUTE <= now:
            return
        if not self._live or self._live[-1].start < slot.start:
            self._live.append(slot)
        self.used += amount

    def departures(self, now: int) -> Iterator[tuple[int, int]]:
        """Yields when each slot will have left, and the change of the count then."""
        for slot in self._live:
            yield slot.last(now) + MINUTE, -slot.amounts[self.kind]
