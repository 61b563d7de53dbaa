"""Times that refused callers of one tenant were told, and the tokens kept for them. Pure: time is an argument.

A place is a promise: whoever comes back between its `due` time and a short grace later is let in, whatever others do in
between. A place k asks for c_k, needs a level of n_k = min(c_k, b) when it is claimed, and is claimed anywhere in
[due_k, due_k + g]. L is the level now and S(t) what the places due at t ask for together. Each bucket has a number
`spare`, what newcomers may take, such that

    S(t) + spare <= L + r(t - now)   at every t from now on                                                (2)

so every claim is paid for, in whatever order they come. What happens, and why (2) stays true:

- A place is promised for the first time at which all that was promised, its need and `spare` will have flowed in.
- A newcomer takes c only if c <= spare, and spare falls with L. A refund raises both.
- A place due now is claimed: S falls with L. Nobody came: S falls, and spare rises by as much. So what is not claimed
  goes to whoever asks now, not to more promises; else callers told often and returning once would hold the rate.
- What flows into a full bucket is lost, and spare falls by it, but never below zero: with L = b, (2) holds for
  spare = 0 if the places by themselves never ask for more than a full bucket gives, even when claimed late. For places
  i..k in the order of promise that is c_i + … + c_(k-1) + n_k <= b + r(due_k - due_i - g). With the running
  pace_k = max(pace_(k-1), due_k) + c_k/r it reads due_k >= pace_(k-1) + g - (b - n_k)/r: one comparison. In the same
  way S(t) - r(t - now) <= r(g + max of pace_k - due_k), which leaves a bucket hardly asked nearly all its level.

A request larger than b needs a full bucket; its grace overlaps with no other's, so that the order of claims is known.
Tokens that are kept lie in the bucket, not outside it: they keep the bound, and are lost only if the bucket overflows.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter

from penstock.tenancy.limits.bucket import Bucket

EARLY = 5_000  # µs before the told time at which a place is due: some timers fire early

_due = attrgetter("due")


class Place:
    __slots__ = ("caller", "costs", "due")

    def __init__(self, caller: int, costs: tuple[int, ...], due: int) -> None:
        self.caller = caller
        self.costs = costs  # one for each bucket
        self.due = due


class PlaceBook:
    """The places of one tenant over its buckets. Callers are told apart by a number; one may hold several places."""

    PER_CALLER = 64  # a caller that keeps coming too early is told its last place again, not given ever more
    IN_ALL = 1024  # beyond it the last time is told again and nothing more is kept

    def __init__(self, buckets: Sequence[Bucket], grace: int) -> None:
        self.spare = [0] * len(buckets)  # means something only while there are places
        self._buckets = buckets
        self._grace = grace
        self.by_due: list[Place] = []  # in the order of their times
        self._by_caller: dict[int, list[Place]] = {}
        self._promised = [0] * len(buckets)
        self._pace = [0] * len(buckets)  # a time
        self._crowding = [0] * len(buckets)  # the most that `pace` was ahead of a place's due time
        self._last_due = 0
        self._barrier = 0  # no place is due before: the grace of the last one that needs a full bucket ends

    def refilled(self, index: int, spilled: int) -> None:
        """A full bucket spilled."""
        bucket = self._buckets[index]
        asked = min(self._promised[index], bucket.rate * (self._crowding[index] + self._grace))
        self.spare[index] = max(0, bucket.capacity - asked, self.spare[index] - spilled)

    def first_expiry(self) -> int:
        return self.by_due[0].due + self._grace

    def num_due(self, now: int) -> int:
        return bisect_right(self.by_due, now, key=_due)

    def due_for(self, caller: int, costs: tuple[int, ...], now: int) -> Place | None:
        for place in self._by_caller.get(caller, ()):
            if place.due <= now and all(c <= kept for c, kept in zip(costs, place.costs, strict=True)):
                return place
        return None

    def keep(self, caller: int, costs: tuple[int, ...], now: int, earliest: int, quantum: int) -> int:
        """Promises a place not before `earliest`; returns the time to tell, a whole number of quanta from now."""
        mine = self._by_caller.get(caller)
        if mine is not None and len(mine) >= self.PER_CALLER and mine[-1].due > now:
            return mine[-1].due + EARLY
        if len(self.by_due) >= self.IN_ALL:
            return max(self._last_due, now + quantum)
        due = max(earliest, self._barrier)
        for index, cost in enumerate(costs):
            due = max(due, self._payable(index, cost, now))
        told = now + max(1, _ceil(due + EARLY - now, quantum)) * quantum
        place = Place(caller, costs, told - EARLY)
        for index, cost in enumerate(costs):
            self._note(index, cost, place.due, now)
        self._last_due = max(self._last_due, place.due)
        insort(self.by_due, place, key=_due)
        insort(self._by_caller.setdefault(caller, []), place, key=_due)
        return told

    def extend(self, place: Place, now: int) -> None:
        """Its caller came in time and must still wait for a slot: its grace begins again."""
        for row in (self.by_due, self._by_caller[place.caller]):
            row.remove(place)
        place.due = now
        for row in (self.by_due, self._by_caller[place.caller]):
            insort(row, place, key=_due)

    def drop(self, place: Place) -> None:
        """Nobody came, or somebody did: then what was kept is taken like any newcomer's, which `spare` now allows."""
        self.by_due.remove(place)
        mine = self._by_caller[place.caller]
        mine.remove(place)
        if not mine:
            del self._by_caller[place.caller]
        for index, cost in enumerate(place.costs):
            self._promised[index] -= cost
            self.spare[index] += cost

    def _payable(self, index: int, cost: int, now: int) -> int:
        bucket = self._buckets[index]
        need = bucket.need(cost)
        missing = self._promised[index] + need - bucket.level
        if self.by_due:
            missing += self.spare[index]
        due = max(
            now + _ceil(missing, bucket.rate), self._pace[index] + self._grace - (bucket.capacity - need) // bucket.rate
        )
        return max(due, self._last_due + self._grace) if cost > bucket.capacity else due

    def _note(self, index: int, cost: int, due: int, now: int) -> None:
        bucket = self._buckets[index]
        if not self.by_due:
            self._crowding[index] = 0
            self.spare[index] = bucket.level + bucket.rate * (due - now) - bucket.need(cost)
        self._promised[index] += cost
        self._pace[index] = max(self._pace[index], due) + _ceil(cost, bucket.rate)
        self._crowding[index] = max(self._crowding[index], self._pace[index] - due)
        if cost > bucket.capacity:
            self._barrier = max(self._barrier, due + self._grace)


def _ceil(amount: int, by: int) -> int:
    return -(-amount // by)
