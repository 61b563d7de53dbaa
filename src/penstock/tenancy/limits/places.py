"""Times that refused callers of one tenant were told, and the room that is kept for them. Pure: time is an argument.

A place is a promise: its caller is let in if it comes back between `due` and a short grace later, whatever others do in
between. A place therefore counts like an admission, from `due` until the latest time at which a claim would have left
the window. The count of a window at every time from now on is known: slots leave it, places begin and end. A newcomer
is admitted, and a place is given, only where that count stays within the limit for as long as it would itself count.
Claims, refunds and places that nobody came for only lower the count, so every promise is kept in whatever order callers
come.

A caller has one place: one that comes too early is told the same time again. The room that places wait for is not free
before they are due, so callers that never come back cost a tenant little more than the grace. But requests reserve more
tokens than they use, and room that comes back early is of no use to a newcomer if it must be free again for a place. So
places hold at most a quarter of a minute's tokens (a twelfth of a smooth rate's), or one request's. Whoever is refused
beyond that is told a time all the same, and then finds what others have left.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from operator import attrgetter

from penstock.tenancy.limits.quota import MINUTE, US
from penstock.tenancy.limits.window import SLOT, Window

GRACE = 2 * US  # long enough for a round trip over the world and a new TLS connection
EARLY = 5_000  # µs before its time that a caller may come, for some timers fire early; then it waits for the rest
MAX_PLACES = 256
KEPT_SHARES = (4, 12)  # places hold a quarter of a minute's tokens, or one request's; a twelfth of a smooth rate

Costs = tuple[int, int]  # requests, tokens

_due = attrgetter("due")


class Place:
    __slots__ = ("caller", "costs", "due")

    def __init__(self, caller: int, costs: Costs, due: int) -> None:
        self.caller = caller
        self.costs = costs
        self.due = due

    def covers(self, costs: Costs) -> bool:
        return costs[0] <= self.costs[0] and costs[1] <= self.costs[1]


class PlaceBook:
    """All places of one tenant. Callers are told apart by a number."""

    def __init__(self) -> None:
        self.by_due: list[Place] = []
        self._by_caller: dict[int, Place] = {}
        self.kept = [0, 0]

    def __len__(self) -> int:
        return len(self.by_due)

    def add(self, place: Place) -> None:
        insort(self.by_due, place, key=_due)
        self._by_caller[place.caller] = place
        for kind, cost in enumerate(place.costs):
            self.kept[kind] += cost

    def remove(self, caller: int) -> Place | None:
        place = self._by_caller.pop(caller, None)
        if place is not None:
            self.by_due.remove(place)
            for kind, cost in enumerate(place.costs):
                self.kept[kind] -= cost
        return place

    def expire(self, now: int) -> None:
        while self.by_due and self.by_due[0].due + GRACE < now:
            self.remove(self.by_due[0].caller)

    def num_due(self, now: int) -> int:
        return bisect_right(self.by_due, now, key=_due)

    def first_fit(self, window: Window, cost: int, earliest: int, hold: int, now: int) -> int:
        """The first time, not before `earliest`, from which `cost` fits the window until it has left it again.

        `hold`: how much later than that time it may be admitted.
        """
        if not cost or window.used + self.kept[window.kind] + cost <= window.limit:
            return earliest
        steps = [*window.departures(now)]
        for place in self.by_due:
            kept = place.costs[window.kind]
            steps += (place.due, kept), (place.due + GRACE + SLOT + MINUTE, -kept)
        steps.sort()
        room = window.limit - cost
        fits_from, count = earliest, window.used
        for at, change in steps:
            if at > fits_from:
                if count > room:
                    fits_from = at
                elif at >= fits_from + hold + SLOT + MINUTE:
                    break
            count += change
        return fits_from
