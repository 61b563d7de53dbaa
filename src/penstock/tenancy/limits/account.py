"""One tenant's limits, taken together or not at all: two buckets, a count of open requests, and places for the refused.

Pure: time is an argument, in integer microseconds. It knows no tenant's name, no socket and no store.
"""

from __future__ import annotations

from penstock.tenancy.limits.bucket import Bucket
from penstock.tenancy.limits.places import EARLY, Place, PlaceBook
from penstock.tenancy.limits.quota import NOBODY, UNIT, US, Quota, Rate, Reason, Refusal

_GRACE = 2 * US  # long enough for a round trip over the world and a new TLS connection
_MEMORY = 10  # requests or so, in the mean time that one stays open


def grace_of(quota: Quota) -> int:
    """How late one may come. A short burst holds little, so it cannot hold it for long."""
    burst_s = min((rate.burst_s for rate in (quota.requests, quota.tokens) if rate is not None), default=10.0)
    return min(_GRACE, round(burst_s * US / 4)) + EARLY


class Reservation:
    """What was taken for one request. Settled or released once; a second time does nothing."""

    __slots__ = ("account", "admitted", "request_span", "requests", "token_span", "tokens", "tokens_from", "used")

    def __init__(self, account: Account, tokens: int, now: int, requests: Bucket | None, from_: Bucket | None) -> None:
        self.account: Account | None = account  # None once it is closed
        self.tokens = tokens
        self.admitted = now
        self.used = 0  # what is known to be used so far: the bill if its holder dies
        self.requests = requests
        self.tokens_from = from_
        self.request_span = None if requests is None else requests.take(UNIT)
        self.token_span = None if from_ is None else from_.take(tokens * UNIT)


class Account:
    """`known_since` caps what a new account starts with: what was given out before that time is not known."""

    def __init__(self, quota: Quota, now: int, known_since: int | None = None, quantum: int = US) -> None:
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.in_use = 0
        self._known_since = known_since
        self._quantum = quantum
        self._mean_open = US
        self._buckets: list[Bucket] = []
        self.change(quota, now)

    def change(self, quota: Quota, now: int) -> None:
        """Other limits from now on. What is owed stays owed; times already told are kept as far as they hold."""
        self.quota = quota
        self.requests = self._updated(self.requests, quota.requests, now)
        self.tokens = self._updated(self.tokens, quota.tokens, now)
        self._largest_tokens = 0 if quota.tokens is None else quota.tokens.largest
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        if buckets != self._buckets or not buckets:
            self._buckets = buckets
            self._places = PlaceBook(buckets, grace_of(quota))

    def _updated(self, bucket: Bucket | None, rate: Rate | None, now: int) -> Bucket | None:
        if rate is None:
            return None
        if bucket is not None:
            bucket.change(rate.per_minute, rate.capacity, now)
            return bucket
        refilled = rate.capacity if self._known_since is None else (now - self._known_since) * rate.per_minute
        return Bucket(rate.per_minute, rate.capacity, now, owed=max(0, rate.capacity - refilled))

    def reserve(self, tokens: int, caller: int, now: int) -> Reservation | Refusal:
        """`caller` tells a returning request from others."""
        self._advance(now)
        places = self._places
        if not places.by_due:  # the way of nearly every request: nobody of this tenant waits
            if self._fits(tokens):
                return self._take(tokens, now)
            return self._refuse(tokens, self._costs(tokens), caller, now)
        costs = self._costs(tokens)
        place = places.due_for(caller, costs, now)
        if place is not None:
            return self._claim(place, tokens, costs, now)
        if self._has_room_behind_places(tokens, costs, now):
            return self._take_from_spare(tokens, costs, now)
        return self._refuse(tokens, costs, caller, now)

    def settle(self, reservation: Reservation, used: int, now: int) -> None:
        """The request ran and used this many tokens."""
        self._close(reservation, used, requests=1, now=now)

    def release(self, reservation: Reservation, now: int) -> None:
        """The request never ran: all comes back."""
        self._close(reservation, 0, requests=0, now=now)

    def restore(self, tokens: int, now: int) -> Reservation:
        """Given out by an earlier limiter and still open: it has its slot; `known_since` covers its tokens."""
        self.in_use += 1
        return Reservation(self, tokens, now, None, None)

    def is_idle(self, now: int) -> bool:
        """Nothing open, owed or promised: as good as new, and may be forgotten."""
        self._advance(now)
        return not self.in_use and not self._places.by_due and not any(bucket.owed for bucket in self._buckets)

    def _advance(self, now: int) -> None:
        """To `now`, by way of the end of every place that nobody came for: what spills before it is not kept for it."""
        places = self._places
        if not places.by_due:
            for bucket in self._buckets:
                bucket.refill(now)
            return
        while places.by_due and (expiry := places.first_expiry()) < now:
            self._refill(expiry)
            places.drop(places.by_due[0])
        self._refill(now)

    def _refill(self, now: int) -> None:
        for index, bucket in enumerate(self._buckets):
            spilled = bucket.refill(now)
            if spilled:
                self._places.refilled(index, spilled)

    def _costs(self, tokens: int) -> tuple[int, ...]:
        """One for each bucket."""
        requests = (UNIT,) if self.requests is not None else ()
        return requests if self.tokens is None else (*requests, tokens * UNIT)

    def _fits(self, tokens: int) -> bool:
        limit = self.quota.concurrency
        if limit is not None and self.in_use >= limit:
            return False
        bucket = self.requests
        if bucket is not None and bucket.owed and bucket.capacity - bucket.owed < UNIT:
            return False
        bucket = self.tokens
        if bucket is None:
            return True
        cost = tokens * UNIT
        return cost <= bucket.capacity - bucket.owed or (not bucket.owed and cost <= self._largest_tokens)

    def _has_room_behind_places(self, tokens: int, costs: tuple[int, ...], now: int) -> bool:
        limit = self.quota.concurrency
        if not self._fits(tokens) or (limit is not None and self.in_use + self._places.num_due(now) >= limit):
            return False
        return all(cost <= spare for cost, spare in zip(costs, self._places.spare, strict=True))

    def _take(self, tokens: int, now: int) -> Reservation:
        self.in_use += 1
        return Reservation(self, tokens, now, self.requests, self.tokens)

    def _take_from_spare(self, tokens: int, costs: tuple[int, ...], now: int) -> Reservation:
        for index, cost in enumerate(costs):
            self._places.spare[index] -= cost
        return self._take(tokens, now)

    def _claim(self, place: Place, tokens: int, costs: tuple[int, ...], now: int) -> Reservation | Refusal:
        if self._fits(tokens):
            self._places.drop(place)
            return self._take_from_spare(tokens, costs, now)
        # Only a slot can be missing: when requests end is not ours to know. The place stays, first in line.
        self._places.extend(place, now)
        return Refusal(self._reason(costs), self._quantum / US, is_due=True)

    def _refuse(self, tokens: int, costs: tuple[int, ...], caller: int, now: int) -> Refusal:
        if self.tokens is not None and tokens * UNIT > self._largest_tokens:
            return Refusal(Reason.TOO_LARGE, None)
        reason = self._reason(costs)
        if caller == NOBODY:
            return Refusal(reason, None)
        earliest = now
        if reason is Reason.CONCURRENCY and self.quota.concurrency is not None:
            earliest += self._mean_open * (1 + len(self._places.by_due)) // self.quota.concurrency
        told = self._places.keep(caller, costs, now, earliest, self._quantum)
        return Refusal(reason, (told - now) / US)

    def _reason(self, costs: tuple[int, ...]) -> Reason:
        short = [b for b, cost in zip(self._buckets, costs, strict=True) if b.level < b.need(cost)]
        if not short and (self.quota.concurrency is None or self.in_use < self.quota.concurrency):
            short = [b for b, cost, spare in zip(self._buckets, costs, self._places.spare, strict=True) if cost > spare]
        if not short:
            return Reason.CONCURRENCY
        return Reason.TOKENS if short[-1] is self.tokens else Reason.REQUESTS

    def _close(self, reservation: Reservation, used: int, requests: int, now: int) -> None:
        if reservation.account is None:
            return
        reservation.account = None
        self.in_use -= 1
        self._mean_open += (now - reservation.admitted - self._mean_open) // _MEMORY
        self._advance(now)
        if reservation.requests is not None and reservation.request_span is not None:
            returned = reservation.requests.close(reservation.request_span, UNIT - requests * UNIT)
            if returned and self._places.by_due:
                self._note_return(reservation.requests, returned)
        if reservation.tokens_from is not None and reservation.token_span is not None:
            returned = reservation.tokens_from.close(reservation.token_span, (reservation.tokens - used) * UNIT)
            if returned and self._places.by_due:
                self._note_return(reservation.tokens_from, returned)

    def _note_return(self, bucket: Bucket, returned: int) -> None:
        if bucket in self._buckets:  # not one of a limit that is gone
            self._places.spare[self._buckets.index(bucket)] += returned
