"""The requests of one model that wait: a line per class and tenant, and the order in which they may leave.

Class before class. Inside a class the tenants share by virtual token counters: the one that was given least goes next,
and one that comes back from idleness starts level with the others. Deficit round robin would be as fair in the long
run; counters also take back, at the end, what a request reserved and did not use, and need no quantum.

Inside a line, first come, first served, but a short request overtakes long ones of its own tenant: those that cost at
least `SHORT_FACTOR` times as much, from the end of the line up to the first that it may not pass. The delay of a long
one is bounded: all that overtake it cost together no more than `MAX_OVERTAKEN` times what it costs itself, so it leaves
at most its own expected service time later than by first come, first served. Then nobody passes it any more. The same
holds for the places kept for long requests that were refused: short ones use at most as much as is kept.

Nothing starves: a request that waited longer than its class's `aging_s` is overdue, and the overdue get a fixed part of
what higher classes take, the oldest first. A part, not a promotion: else the backlog of a long overload would one day
become interactive all at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from penstock.admission.ledger import expected_cost
from penstock.admission.pace import Pace
from penstock.admission.promises import Promise, Promises
from penstock.admission.settings import AdmissionSettings
from penstock.core.request import Priority
from penstock.router.request import EdgeRequest

SHORT_FACTOR = 4  # who costs a fourth or less is short beside another
MAX_OVERTAKEN = 1.0  # times a request's own cost: what may overtake it, all together
_MANY_LINES = 1024


@dataclass(slots=True, eq=False)
class Waiting:
    request: EdgeRequest
    since: float
    deadline: float
    order: int
    is_promised: bool  # it was told to come back now
    cost: int
    kv_tokens: int
    overtaken_cost: int = 0  # of those that came later and went before it

    def lets_pass(self, cost: int) -> bool:
        return cost * SHORT_FACTOR <= self.cost and self.overtaken_cost + cost <= MAX_OVERTAKEN * self.cost


class Line:
    """The line of one tenant in one class."""

    def __init__(self, priority: Priority, tenant: str, counter: float) -> None:
        self.priority = priority
        self.tenant = tenant
        self.items: deque[Waiting] = deque()
        self.waiting_cost = 0
        self.promised_cost = 0
        self._promised: Counter[int] = Counter()  # the same by the order of magnitude of each
        self._promises_overtaken = 0  # cost of short requests that took no account of those for long ones
        self.counter = counter  # cost given to the tenant, on the class's virtual clock
        self.pace = Pace()

    def keep(self, cost: int) -> None:
        """A place for one that was refused."""
        self.promised_cost += cost
        self._promised[cost.bit_length()] += cost

    def keep_no_longer(self, cost: int) -> None:
        self.promised_cost -= cost
        self._promised[cost.bit_length()] -= cost
        self._promises_overtaken = max(0, self._promises_overtaken - cost)

    def cost_before(self, cost: int) -> int:
        """The cost that leaves before a newcomer of this cost, or is kept for those who may come back meanwhile."""
        place, kept = self._place(cost), self.promised_cost - self._passable_promises(cost)
        return (
            self.waiting_cost - sum(item.cost for item in islice(reversed(self.items), len(self.items) - place)) + kept
        )

    def insert(self, item: Waiting) -> None:
        place = self._place(item.cost)
        for passed in islice(reversed(self.items), len(self.items) - place):
            passed.overtaken_cost += item.cost
        if self._passable_promises(item.cost):
            self._promises_overtaken += item.cost
        self.items.insert(place, item)
        self.waiting_cost += item.cost

    def _place(self, cost: int) -> int:
        place = len(self.items)
        for item in reversed(self.items):
            if not item.lets_pass(cost):
                break
            place -= 1
        return place

    def _passable_promises(self, cost: int) -> int:
        """The kept places, by their cost, that one of this cost need not take into account."""
        least = (cost * SHORT_FACTOR).bit_length() + 1  # each of these is larger than that
        kept = sum(amount for size, amount in self._promised.items() if size >= least)
        return kept if self._promises_overtaken + cost <= MAX_OVERTAKEN * kept else 0


class ModelQueue:
    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._lines: dict[tuple[Priority, str], Line] = {}
        self._waiting: dict[str, Waiting] = {}
        self._lengths = dict.fromkeys(Priority, 0)
        self._virtual = dict.fromkeys(Priority, 0.0)  # the counter of whoever was last given something
        self._overdue_credit = 0.0
        self._orders = 0
        self._promises = Promises(settings.max_promises, settings.promise_grace_s)
        self.kv_tokens = 0  # asked for by all who wait
        self.pace = Pace()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def items(self) -> Collection[Waiting]:
        return self._waiting.values()

    def length(self, priority: Priority) -> int:
        return self._lengths[priority]

    def line(self, request: EdgeRequest) -> Line:
        key = (request.priority, request.tenant)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) >= _MANY_LINES:
                self._forget_idle()
            line = self._lines[key] = Line(*key, self._virtual[request.priority])
        return line

    def _forget_idle(self) -> None:
        """A line that is empty and level with the clock is as good as new."""
        for key, line in list(self._lines.items()):
            if not line.items and not line.promised_cost and line.counter <= self._virtual[line.priority]:
                del self._lines[key]

    # -- in and out --------------------------------------------------------------------------------------------------

    def push(
        self, request: EdgeRequest, now: float, deadline: float, guess: float, *, is_promised: bool, most_kv: int
    ) -> Waiting:
        """`most_kv`: the tokens that it can fill at a time, wherever it goes."""
        line = self.line(request)
        self._orders += 1
        kv_tokens = min(request.kv_tokens, most_kv)
        item = Waiting(request, now, deadline, self._orders, is_promised, expected_cost(request), kv_tokens)
        if not self._waiting:
            self.pace.begin(now, guess)
        if not line.items:
            line.counter = max(line.counter, self._virtual[request.priority])
            line.pace.begin(now, self.pace.rate(now) / self._num_sharers(line))
        line.insert(item)
        self._waiting[request.id] = item
        self._lengths[request.priority] += 1
        self.kv_tokens += kv_tokens
        return item

    def _num_sharers(self, line: Line) -> int:
        """Returns how many lines have a claim to what leaves the queue, this one included."""
        return 1 + sum(1 for o in self._lines.values() if o is not line and o.items and o.priority <= line.priority)

    def remove(self, request_id: str) -> Waiting | None:
        item = self._waiting.pop(request_id, None)
        if item is None:
            return None
        line = self.line(item.request)
        line.items.remove(item)
        line.waiting_cost -= item.cost
        self._lengths[item.request.priority] -= 1
        self.kv_tokens -= item.kv_tokens
        return item

    def give(self, item: Waiting, now: float) -> None:
        """It leaves the line for a replica."""
        line = self.line(item.request)
        self._pay_overdue(item)
        self.pace.left(item.cost, now)
        line.pace.left(item.cost, now)
        self.remove(item.request.id)
        self.charge(item.request, item.cost)

    def charge(self, request: EdgeRequest, amount: float) -> None:
        """Count what a tenant was given."""
        line, virtual = self.line(request), self._virtual
        start = line.counter if line.counter > virtual[request.priority] else virtual[request.priority]
        virtual[request.priority] = start
        line.counter = start + amount

    def settle(self, request: EdgeRequest, difference: float) -> None:
        """Corrects the line's account: what it was given turned out to be so much more, or less."""
        self.line(request).counter += difference

    # -- kept places -------------------------------------------------------------------------------------------------

    def promise(self, request: EdgeRequest, due: float) -> bool:
        """Keep a place for a refused request that comes back when it is due. False: too many are kept already."""
        amount = expected_cost(request)
        is_kept = self._promises.make((request.priority, request.tenant, request.fingerprint), due, amount)
        if is_kept:
            self.line(request).keep(amount)
        return is_kept

    def promised(self, request: EdgeRequest) -> Promise | None:
        return self._promises.find((request.priority, request.tenant, request.fingerprint))

    def redeem(self, request: EdgeRequest) -> None:
        """The request came: what was promised to it is kept no longer."""
        promise = self._promises.find((request.priority, request.tenant, request.fingerprint))
        if promise is not None:
            self._promises.end(promise)
            self.line(request).keep_no_longer(promise.cost)

    def expire_promises(self, now: float) -> None:
        for promise in self._promises.expire(now):
            self._lines[promise.key[:2]].keep_no_longer(promise.cost)

    # -- order -------------------------------------------------------------------------------------------------------

    def next(self, now: float, skipping: Collection[Line] = ()) -> Waiting | None:
        """Returns the one who goes next, past the lines that were found to be blocked."""
        lines = [line for line in self._lines.values() if line.items and line not in skipping]
        if not lines:
            return None
        first = min(lines, key=lambda line: (line.priority, line.counter, line.items[0].order)).items[0]
        if self._overdue_credit < 0:
            return first
        overdue = [
            line.items[0]
            for line in lines
            if line.priority > first.request.priority and self.is_overdue(line.items[0], now)
        ]
        return min(overdue, key=lambda item: item.order) if overdue else first

    def is_overdue(self, item: Waiting, now: float) -> bool:
        return now - item.since >= self._settings.classes[item.request.priority].aging_s

    def _pay_overdue(self, item: Waiting) -> None:
        """Charges an item that goes before a higher class; a part of what the higher classes then take pays for it."""
        priority = item.request.priority
        if any(self._lengths[above] for above in Priority if above < priority):
            self._overdue_credit -= item.cost
        else:
            share = self._settings.overdue_share
            self._overdue_credit = min(0.0, self._overdue_credit + share * item.cost)

    def wait_s(self, request: EdgeRequest, now: float, guess: float) -> float:
        """Returns how long a newcomer would wait: behind those of its own line that it does not overtake, at the pace
        at which that line moves."""
        line = self.line(request)
        if line.items:
            rate = line.pace.rate(now)
        else:
            rate = (self.pace.rate(now) if self._waiting else guess) / self._num_sharers(line)
        cost = expected_cost(request)
        return (line.cost_before(cost) + cost) / rate

    def clear_s(self, priority: Priority, now: float) -> float:
        """Returns how long it takes until those of a class that wait now are gone."""
        return sum(line.waiting_cost for line in self._lines.values() if line.priority == priority) / self.pace.rate(
            now
        )

    def victim(self, newcomer: EdgeRequest) -> Waiting | None:
        """Returns the one that gives way in a full class: the one that fills most, of the tenant that has most waiting.
        None: the newcomer."""
        amount = expected_cost(newcomer)
        lines = [line for line in self._lines.values() if line.priority == newcomer.priority and line.items]
        heaviest = max(lines, key=lambda line: line.waiting_cost)
        if heaviest.tenant == newcomer.tenant or self.line(newcomer).waiting_cost + amount >= heaviest.waiting_cost:
            return None
        candidates = [item for item in heaviest.items if not item.is_promised]
        return max(candidates, key=lambda item: (item.request.kv_tokens, item.order), default=None)
