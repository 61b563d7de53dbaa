"""Fair sharing of an engine among tenants: whose turn it is, whose blocks and places are lent, and who gives them back.

Turns go by virtual token counters (Sheng et al., OSDI '24): a token computed counts one and a token chosen counts one,
divided by the tenant's weight, and the tenant that was given least goes first. A clock runs with what all together are
given. A tenant that comes back from idleness starts a step's worth behind it, or level with the tenant furthest behind,
but a few steps at most: that is enough to begin at once, and nothing more is saved up, by those who are here neither.

Blocks and places are divided by weight among the tenants that are here. Unused ones are lent. A tenant that would stay
within its share has a claim: if there is no room for it, the last comer of one that is over its share gives way. A
tenant within its share gives way to no claim, so what is borrowed is borrowed at the borrower's risk and the rest is
safe; and one that gave way has no claim to come back with.

While one tenant is here alone, nothing of this is asked, and what it is given is counted when another comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from penstock.kv.pool import BlockPool
from penstock.sched.counters import SchedulerCounters
from penstock.sched.sequence import Sequence

DECODE_COST = 2  # of one token that follows another
_MAX_STEPS = 4
_MANY = 1024  # tenants that are remembered


@dataclass(slots=True, eq=False)
class Share:
    """One tenant's share of the engine: its weight, what it was given, and its sequences that run."""

    weight: float = 1.0
    num_here: int = 0  # sequences, waiting or running
    lift: float = -inf  # a new one owes nothing
    served: int = 0  # since the lift
    running: dict[Sequence, None] = field(default_factory=dict)

    @property
    def virtual(self) -> float:
        """Tokens it was given, divided by its weight, on the clock that all share."""
        return self.lift + self.served / self.weight

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it holds; those that a sequence shares are counted where they were first held."""
        return sum(len(s.table.block_ids) - s.table.num_shared for s in self.running if s.table is not None)

    def begin(self, virtual: float, weight: float) -> None:
        self.lift, self.served, self.weight = virtual, 0, weight


class Shares:
    """`is_contested`: there is more than one tenant here, so that it matters who is who."""

    def __init__(self, num_places: int, pool: BlockPool, counters: SchedulerCounters, step_tokens: int) -> None:
        self.is_contested = False
        self._num_places = num_places
        self._pool = pool
        self._counters = counters
        self._step_tokens = step_tokens
        self._shares: dict[str, Share] = {}
        self._here: dict[Share, None] = {}
        self._weights = 0.0  # of those
        self._clock = 0.0  # when somebody last came or went
        self._served = 0  # to all, since then
        self._work = 0  # of the scheduler, until then

    # -- who is here -------------------------------------------------------------------------------------------------

    def join(self, sequence: Sequence) -> None:
        request = sequence.request
        share = self._shares.get(request.tenant)
        if share is None:
            if len(self._shares) >= _MANY:
                self._forget()
            share = self._shares[request.tenant] = Share()
        if share.num_here == 0:
            self._read_clock()
            self._limit_credit()
            share.begin(max(share.virtual, self._start(request.weight)), request.weight)
            self._here[share] = None
            self._count()
        elif share.weight != request.weight:
            share.begin(share.virtual, request.weight)
            self._count()
        share.num_here += 1
        sequence.share = share

    def leave(self, sequence: Sequence) -> None:
        share = sequence.share
        share.running.pop(sequence, None)
        share.num_here -= 1
        if share.num_here == 0:
            self._read_clock()
            del self._here[share]
            self._count()

    def _start(self, weight: float) -> float:
        """Virtual counter at which a tenant that owes nothing starts."""
        if not self._here:
            return self._clock
        step = self._step_tokens / weight
        return min(self._clock - step, max(self._clock - _MAX_STEPS * step, min(share.virtual for share in self._here)))

    def _limit_credit(self) -> None:
        """Caps the credit of tenants that could not use their turns, for want of places, before another one comes."""
        for share in self._here:
            share.lift += max(0.0, self._clock - _MAX_STEPS * self._step_tokens / share.weight - share.virtual)

    def _read_clock(self) -> None:
        """Moves the clock on. A tenant alone here is charged with all work done since, which was not counted."""
        if len(self._here) == 1:
            self._served = self._counters.work - self._work
            next(iter(self._here)).served += self._served
        if self._here:
            self._clock += self._served / self._weights
        self._served, self._work = 0, self._counters.work

    def _count(self) -> None:
        self._weights = sum(share.weight for share in self._here)
        self.is_contested = len(self._here) > 1

    def _forget(self) -> None:
        """One that is not here and is no further ahead than a new one is as good as new."""
        for tenant, share in list(self._shares.items()):
            if share.num_here == 0 and share.virtual <= self._clock - self._step_tokens / share.weight:
                del self._shares[tenant]

    # -- what each is given, and holds -------------------------------------------------------------------------------

    def charge(self, sequence: Sequence, cost: int) -> None:
        if self.is_contested:
            sequence.share.served += cost
            self._served += cost

    def enter(self, sequence: Sequence) -> None:
        """It runs."""
        sequence.share.running[sequence] = None

    def exit(self, sequence: Sequence) -> None:
        """It waits again."""
        del sequence.share.running[sequence]

    def places(self, share: Share, more: int = 0) -> float:
        """Places it has, and `more`, as a multiple of its share; one is in everybody's, however many they are."""
        return (len(share.running) + more) / max(1.0, self._num_places * share.weight / self._weights)

    def blocks(self, share: Share, more: int = 0) -> float:
        return (share.num_blocks + more) * self._weights / (self._pool.num_blocks * share.weight)

    def have_room_for(self, newcomer: Sequence) -> bool:
        """It has a claim: with it, its tenant would stay within its share."""
        num_blocks = -(-len(newcomer.token_ids) // self._pool.block_size)
        return self.places(newcomer.share, 1) <= 1.0 and self.blocks(newcomer.share, num_blocks) <= 1.0
