"""One token bucket that is exact under reservations: the window bound holds, and what was not used comes back.

Time is an argument and every number is an integer: microseconds, and units of which a token has sixty million, so that
a rate of R per minute pours R units in each microsecond and nothing is ever rounded.

**The bound.** A reservation counts with what it reserved until it is settled and with what it used from then on, at the
time it was admitted. Let A[s,t] be what was admitted in a window, r the rate, b the capacity. The level kept here is

    L(t) = min over s <= t of  b + r(t - s) - A[s,t]                                                       (1)

and a reservation of c <= b is admitted only when L >= c. So (1) is never negative right after an admission, which is
the bound A[s,t] <= r(t - s) + b; and since settling only ever lowers A, it stays true of all windows for ever.

**The refund.** Giving back `min(b, L + unused)` is wrong. While a reservation held b, the bucket may have refilled and
been taken from again; the plain refund then lets b be taken twice within one instant. By (1) a refund of d to a
reservation admitted at time a raises only the windows that began before a: the level may rise by what keeps it, *at
every time since a*, under b. That headroom, b - max of L since a, is kept for all open reservations at once. Write the
debt b - L as a row of parts, one for each open reservation in order of admission, such that the headroom of the i-th is
the sum of parts 1..i:

    admit c      a new last part of c
    refill x     x is taken off the last parts first         (L rises now: the headroom of the newest shrinks first)
    settle i     the unused d is taken off part i, then i-1, … as far as there is any; then what is left of part i
                 passes to part i+1                          (L rose at a and ever since)

A part that reaches zero can never differ again from its older neighbour, so the two become one (`Span`, a linked list
with union-find): every operation is O(1) amortized. What reaches the old end is forgiven: its refund is zero for ever.

**Larger than the burst.** A request of c > b fits no window shorter than (c - b)/r, so either it is never admitted or
the bound must read max(b, c). It is admitted out of a full bucket only and leaves a debt: L = b - c < 0, and nothing
else enters until that is refilled. Then A[s,t] <= r(t - s) + max(b, c) for windows that hold such a request, where c is
what it *used* once settled: one that reserved more than the burst and used less never breaks r(t - s) + b.
"""

from __future__ import annotations


class Span:
    """Debt that the same open reservations may lower, and the receipt for what was taken."""

    __slots__ = ("debt", "into", "newer", "older", "open")

    def __init__(self, debt: int, older: Span | None) -> None:
        self.debt = debt
        self.open = 1  # reservations whose refund begins here
        self.older = older
        self.newer: Span | None = None
        self.into: Span | None = None  # set once it has become one with an older span


class Bucket:
    """Starts full unless told what is owed."""

    __slots__ = ("_at", "_forgiven", "_loose", "_newest", "capacity", "owed", "rate")

    def __init__(self, rate: int, capacity: int, now: int, owed: int = 0) -> None:
        self.rate = rate
        self.capacity = capacity
        self.owed = owed  # always the sum of all parts
        self._at = now
        self._loose = owed  # the part that is newer than every open reservation
        self._forgiven = Span(0, None)
        self._newest = self._forgiven

    @property
    def level(self) -> int:
        return self.capacity - self.owed

    def need(self, cost: int) -> int:
        """The level at which `cost` may be taken: a request larger than the bucket asks for a full one."""
        return cost if cost < self.capacity else self.capacity

    def refill(self, now: int) -> int:
        """Returns what spilled over."""
        paid = (now - self._at) * self.rate
        if paid <= 0:
            return 0  # a clock that stands still or steps back pours nothing
        self._at = now
        spilled = paid - self.owed
        if spilled >= 0:
            paid = self.owed
            if not paid:
                return spilled
        self.owed -= paid
        if paid <= self._loose:
            self._loose -= paid
        else:
            paid -= self._loose
            self._loose = 0
            self._pay(self._newest, paid)
        return spilled if spilled > 0 else 0

    def take(self, cost: int) -> Span:
        """The caller has seen that `level >= need(cost)`. Every span taken is closed exactly once."""
        span = Span(self._loose + cost, self._newest)
        self._newest.newer = span
        self._newest = span
        self._loose = 0
        self.owed += cost
        return span

    def close(self, span: Span, unused: int) -> int:
        """Settle. Returns how much of `unused` comes back; below zero, more was used, and that is owed."""
        if span.into is not None:
            span = self._find(span)
        if unused:
            if unused > 0:
                unused = self._pay(span, unused)
                span = self._find(span)
            else:
                self._loose -= unused
            self.owed -= unused
        span.open -= 1
        if not span.open and span is not self._forgiven:
            if span.newer is None:
                self._loose += span.debt
            else:
                span.newer.debt += span.debt
            self._unlink(span)
        return unused

    def change(self, rate: int, capacity: int, now: int) -> None:
        """Other limits from now on; what is owed stays owed."""
        self.refill(now)
        self.rate = rate
        self.capacity = capacity

    def _pay(self, span: Span, amount: int) -> int:
        """Takes up to `amount` off `span` and then off older ones; says how much there was."""
        left = amount
        while span.older is not None:
            if span.debt > left:
                span.debt -= left
                return amount
            left -= span.debt
            older = span.older
            older.open += span.open
            span.into = older
            self._unlink(span)
            span = older
        return amount - left

    def _unlink(self, span: Span) -> None:
        older, newer = span.older, span.newer
        assert older is not None
        older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older

    @staticmethod
    def _find(span: Span) -> Span:
        root = span
        while root.into is not None:
            root = root.into
        while span.into is not None:
            span.into, span = root, span.into
        return root
