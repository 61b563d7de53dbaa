"""One tenant's limits, taken together or not at all: windows, a count of open requests, and places for the refused.

Pure: time is an argument, in integer microseconds. It knows no tenant's name, no socket and no store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from penstock.tenancy.limits.pacer import Pacer
from penstock.tenancy.limits.places import EARLY, GRACE, KEPT_SHARES, MAX_PLACES, Costs, Place, PlaceBook
from penstock.tenancy.limits.quota import MINUTE, NOBODY, REQUESTS, TOKENS, US, Quota, Reason, Refusal
from penstock.tenancy.limits.window import SLOT, Slot, Window

REASONS = (Reason.REQUESTS, Reason.TOKENS)
_MEMORY = 10  # requests or so, in the mean time that one stays open

Note = Callable[[Slot, int, int], None]  # a slot, and the change of its requests and tokens


class Reservation(msgspec.Struct, eq=False):
    """Requests and tokens taken for one request. Settled or released once; a second time does nothing."""

    account: TenantLimits | None  # None once it is closed
    tokens: int
    admitted: int  # when
    slot: Slot | None
    used: int = 0  # what is known to be used so far: the bill if its holder dies


class TenantLimits:
    """`slots`: what an earlier limiter admitted, in order. `note` is called with every change of a slot."""

    def __init__(
        self, quota: Quota, now: int, *, slots: Iterable[Slot] = (), quantum: int = US, note: Note | None = None
    ) -> None:
        self.in_use = 0
        self.slots = deque(slots)
        self._at = now
        self._quantum = quantum
        self._note = note
        self._mean_open = US
        self.change(quota, now)

    def change(self, quota: Quota, now: int) -> None:
        """Set other limits. What was admitted counts as before; times told under the old limits are forgotten."""
        self.quota = quota
        self._places = PlaceBook()
        rates = [(kind, rate) for kind, rate in enumerate((quota.requests, quota.tokens)) if rate is not None]
        self.windows = [Window(kind, rate.per_minute, self.slots, now) for kind, rate in rates]
        self._pacers = [
            Pacer(window.kind, rate.per_minute, window.used, now)
            for window, (_, rate) in zip(self.windows, rates, strict=True)
            if rate.smooth
        ]

    def reserve(self, tokens: int, caller: int, now: int) -> Reservation | Refusal:
        """`caller` tells a returning request from others."""
        now = self._advance(now)
        costs = (1, tokens)
        own = self._places.remove(caller) if self._places.by_due else None
        came_as_told = own is not None and own.due - EARLY <= now and own.covers(costs)
        is_in_pace = came_as_told or not self._pacers or self._is_in_pace(costs)
        has_room = is_in_pace and self._has_room(costs, 0, now)
        if has_room and self._may_open(now, came_as_told):
            if own is not None and own.costs[TOKENS] and not tokens:
                self._places.add(own)  # it only knocks, and will ask for its tokens next
            return self._admit(tokens, now)
        limit = self.quota.tokens
        if limit is not None and tokens > limit.per_minute:
            return Refusal(Reason.TOO_LARGE, None, limit=limit.per_minute)
        refusal = self._refusal(costs, now)
        if own is not None and own.covers(costs) and now < own.due:
            self._places.add(own)
            return replace(refusal, retry_after_s=(own.due - now) / US, is_due=came_as_told)
        if came_as_told and has_room and self._has_room(costs, GRACE, now):
            # Only concurrency is short, and when requests end is not ours to know: the place stays, first in line.
            self._places.add(Place(caller, costs, now))
            return replace(refusal, retry_after_s=self._quantum / US, is_due=True)
        if caller == NOBODY:
            return refusal
        due = self._due(costs, refusal.reason, now)
        self._keep(Place(caller, costs, due))
        return replace(refusal, retry_after_s=(due - now) / US)

    def settle(self, reservation: Reservation, used: int, now: int) -> None:
        """The request ran and used this many tokens."""
        self._close(reservation, 1, used, now)

    def release(self, reservation: Reservation, now: int) -> None:
        """The request never ran: all comes back."""
        self._close(reservation, 0, 0, now)

    def restore(self, tokens: int, now: int) -> Reservation:
        """Take over an open reservation of an earlier limiter. Its tokens are in `slots`, and stay there."""
        self.in_use += 1
        return Reservation(self, tokens, now, None)

    def is_idle(self, now: int) -> bool:
        """Nothing open, used or promised: as good as new, and may be forgotten."""
        self._advance(now)
        return not self.in_use and not self.slots and not self._places

    def _advance(self, now: int) -> int:
        """A clock that steps back stands still."""
        now = self._at = max(now, self._at)
        if self._places.by_due:
            self._places.expire(now)
        if self.slots and self.slots[0].newest + MINUTE <= now:  # else no window has one to let go of
            while self.slots and self.slots[0].newest + MINUTE <= now:
                self.slots.popleft()
            for window in self.windows:
                window.advance(now)
        for pacer in self._pacers:
            pacer.advance(now)
        return now

    def _may_open(self, now: int, came_as_told: bool) -> bool:
        limit = self.quota.concurrency
        if limit is None:
            return True
        num_due = self._places.num_due(now) if self._places.by_due and not came_as_told else 0
        return self.in_use + num_due < limit

    def _has_room(self, costs: Costs, hold: int, now: int) -> bool:
        for window in self.windows:
            if not window.has_room(costs[window.kind]):
                return False
        return not self._places.by_due or self._first_fit(costs, now, hold, now) == now

    def _is_in_pace(self, costs: Costs) -> bool:
        return all(pacer.has_room(costs[pacer.kind], self._places.kept[pacer.kind]) for pacer in self._pacers)

    def _first_fit(self, costs: Costs, earliest: int, hold: int, now: int) -> int:
        """The first time at which every window has room."""
        fits = [self._places.first_fit(w, costs[w.kind], earliest, hold, now) for w in self.windows]
        return max(fits, default=earliest)

    def _admit(self, tokens: int, now: int) -> Reservation:
        self.in_use += 1
        return Reservation(self, tokens, now, self._record(1, tokens, now))

    def _record(self, requests: int, tokens: int, now: int) -> Slot:
        if not self.slots or now >= self.slots[-1].start + SLOT:
            self.slots.append(Slot(now, now))
        slot = self.slots[-1]
        slot.newest = now
        self._add(slot, requests, tokens, now)
        return slot

    def _add(self, slot: Slot, requests: int, tokens: int, now: int) -> None:
        slot.amounts[REQUESTS] += requests
        slot.amounts[TOKENS] += tokens
        amounts = (requests, tokens)
        for window in self.windows:
            window.add(slot, amounts[window.kind], now)
        for pacer in self._pacers:
            pacer.add(amounts[pacer.kind])
        if self._note is not None:
            self._note(slot, requests, tokens)

    def _close(self, reservation: Reservation, requests: int, used: int, now: int) -> None:
        if reservation.account is None:
            return
        reservation.account = None
        self.in_use -= 1
        self._mean_open += (now - reservation.admitted - self._mean_open) // _MEMORY
        now = self._advance(now)
        unused = reservation.tokens - used
        if reservation.slot is not None and (unused > 0 or not requests):
            self._add(reservation.slot, requests - 1, -max(unused, 0), now)
        if unused < 0:  # more than was reserved: it counts from now on
            self._record(0, -unused, now)

    def _refusal(self, costs: Costs, now: int) -> Refusal:
        """Returns the refusal by the last limit that is short, without a time to come back."""
        kept = self._places.kept
        short = [window for window in self.windows if not window.has_room(costs[window.kind])]
        if not short and self._places.by_due:
            short = [w for w in self.windows if self._places.first_fit(w, costs[w.kind], now, 0, now) > now]
        if short:
            window = short[-1]
            return Refusal(REASONS[window.kind], None, False, window.limit, window.used, kept[window.kind])
        paced = [pacer.kind for pacer in self._pacers if not pacer.has_room(costs[pacer.kind], kept[pacer.kind])]
        if paced:
            window = next(window for window in self.windows if window.kind == paced[-1])
            return Refusal(REASONS[window.kind], None, False, window.limit, window.used, kept[window.kind], True)
        return Refusal(Reason.CONCURRENCY, None, False, self.quota.concurrency or 0, self.in_use)

    def _due(self, costs: Costs, reason: Reason, now: int) -> int:
        """The time to tell, a whole number of quanta from now."""
        kept, quantum = self._places.kept, self._quantum
        due = now + quantum
        if reason is Reason.CONCURRENCY and self.quota.concurrency is not None:
            due = max(due, now + self._mean_open * (1 + len(self._places)) // self.quota.concurrency)
        for pacer in self._pacers:
            due = max(due, pacer.first_fit(costs[pacer.kind], kept[pacer.kind], now))
        while True:
            due = now - (now - due) // quantum * quantum
            fits_from = self._first_fit(costs, due, GRACE, now)
            if fits_from == due:
                return due
            due = fits_from

    def _keep(self, place: Place) -> None:
        """Adds a place, as far as places may hold so much."""
        kept, requests, tokens = self._places.kept, self.quota.requests, self.quota.tokens
        if len(self._places) >= MAX_PLACES or (requests is not None and kept[REQUESTS] >= requests.per_minute):
            return
        held = kept[TOKENS] + place.costs[TOKENS]
        if tokens is None or not kept[TOKENS] or held * KEPT_SHARES[tokens.smooth] <= tokens.per_minute:
            self._places.add(place)
