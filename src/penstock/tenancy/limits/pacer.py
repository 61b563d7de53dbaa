"""The pace of a smooth rate: a token bucket under the window, which spreads the limit over the minute.

It holds a sixth of the limit, and at least one request, and fills at the limit's own pace. A request larger than that
waits until it is full and leaves a debt. The window alone keeps the bound, so what was not used simply comes back here.

Every number is an integer: microseconds, and units of which a token has sixty million, so that a limit of N per minute
pours N units in each microsecond and nothing is ever rounded.
"""

from __future__ import annotations

from penstock.tenancy.limits.quota import MINUTE, US

UNIT = MINUTE
_DEPTH = 10 * US


class Pacer:
    __slots__ = ("_at", "capacity", "kind", "level", "rate")

    def __init__(self, kind: int, per_minute: int, used: int, now: int) -> None:
        """`used`: what the window holds already; it is not given out again at once."""
        self.kind = kind
        self.rate = per_minute
        self.capacity = max(UNIT, per_minute * _DEPTH)
        self.level = max(0, self.capacity - used * UNIT)
        self._at = now

    def advance(self, now: int) -> None:
        self.level = min(self.capacity, self.level + (now - self._at) * self.rate)
        self._at = now

    def has_room(self, cost: int, kept: int) -> bool:
        """`kept`: for others, who will be let in at their times even if the bucket is empty then."""
        return not cost or self.level >= min(self.capacity, (cost + kept) * UNIT)

    def add(self, amount: int) -> None:
        """Count more, or less."""
        self.level = min(self.capacity, self.level - amount * UNIT)

    def first_fit(self, cost: int, kept: int, now: int) -> int:
        missing = min(self.capacity, cost * UNIT) + kept * UNIT - self.level
        return now - min(0, -missing // self.rate) if cost else now
