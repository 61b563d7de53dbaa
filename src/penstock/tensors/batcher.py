"""Dynamic batching: which waiting requests are executed together, and when.

Pure: time is an argument, and nothing here waits or computes. The caller that has an idle instance calls `take`; if
that returns nothing, `next_change_s` says when it is worth another try without a new request.

    add ──▶ levels 1, 2, … (priority; 1 is first), each in the order of arrival ──▶ take: a batch
                                                                        └─▶ expire: those that waited too long

Requests of one batch have the same `key`: the shapes and types of their inputs without the batch dimension. A batch
begins with the oldest request of the first level whose batch is due, and has others of its key in the same order, as
far as they fit. A batch is due when it is as large as it may get, when its size is preferred, or when its oldest
request has waited for the longest delay. So a request waits for an idle instance, for those before it, and for the
delay, but never for one of another shape.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Generic, NamedTuple, TypeVar

from penstock.core.errors import InvalidRequest, Overloaded

T = TypeVar("T")

_EPSILON_S = 1e-6  # a timer is set by a difference, and may come so much too early
_MAX_LOOKED_AT = 4096  # requests that are looked at for a batch: a look takes a millisecond at most


@dataclass(frozen=True)
class QueuePolicy:
    """Rules of one level."""

    max_queue_size: int  # requests that wait
    default_timeout_s: float | None = None  # for requests that name none
    allow_timeout_override: bool = True  # else a request's own timeout is not looked at
    rejects_late: bool = True  # one whose time is over; else it waits behind all others


@dataclass(frozen=True)
class BatchingRules:
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_s: float = 0.0
    priority_levels: int = 1
    default_priority_level: int = 1
    policies: Mapping[int, QueuePolicy] = field(default_factory=dict)  # by level, where it is not `policy`
    policy: QueuePolicy = QueuePolicy(1024)
    max_queue_bytes: int = 256 << 20  # of inputs that wait, at all levels
    joins: bool = True  # requests are executed together; else each by itself

    def policy_at(self, level: int) -> QueuePolicy:
        return self.policies.get(level, self.policy)


@dataclass(eq=False)
class Waiting(Generic[T]):
    """A request in the queue."""

    payload: T
    size: int  # rows of its batch dimension
    key: Hashable
    level: int
    num_bytes: int
    arrived_s: float
    deadline_s: float | None  # when it has waited too long
    is_late: bool = False  # it has, and waits on, behind all others


class Batch(NamedTuple, Generic[T]):
    requests: list[Waiting[T]]
    size: int  # rows


class Batcher(Generic[T]):
    def __init__(self, rules: BatchingRules) -> None:
        self.rules = rules
        self._preferred = tuple(sorted({one for one in rules.preferred_batch_sizes if one < rules.max_batch_size}))
        # Requests by level, in the order of arrival; the last level is of late ones. Dicts keep order and forget fast.
        self._levels: list[dict[Waiting[T], None]] = [{} for _ in range(rules.priority_levels + 1)]
        self.num_bytes = 0
        self._deadline_s = inf  # no request's time is over before

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    @property
    def num_rows(self) -> int:
        return sum(one.size for one in self._waiting())

    def num_at(self, level: int) -> int:
        """Requests that wait at a level and are not late."""
        return len(self._levels[level - 1])

    def add(
        self,
        payload: T,
        now_s: float,
        *,
        size: int = 1,
        key: Hashable = None,
        priority: int = 0,
        timeout_s: float | None = None,
        num_bytes: int = 0,
    ) -> Waiting[T]:
        """`priority`: a level; 0: the default one. Raises InvalidRequest and Overloaded; then nothing was added."""
        rules = self.rules
        if not 1 <= size <= rules.max_batch_size:
            raise InvalidRequest(f"the batch has {size} rows; this model takes 1 to {rules.max_batch_size}")
        if not 0 <= priority <= rules.priority_levels:
            raise InvalidRequest(f"priority is to be 0 to {rules.priority_levels}", param="priority")
        level = priority or rules.default_priority_level
        policy = rules.policy_at(level)
        if self.num_at(level) >= policy.max_queue_size:
            said = f"{self.num_at(level)} requests wait for this model, as many as may"
            raise Overloaded(said, reason="max_queue_size")
        if self.num_bytes and self.num_bytes + num_bytes > rules.max_queue_bytes:
            raise Overloaded("the inputs that wait for this model have no room for more", reason="max_queue_bytes")
        if timeout_s is None or not policy.allow_timeout_override:
            timeout_s = policy.default_timeout_s
        deadline_s = None if timeout_s is None else now_s + timeout_s
        waiting = Waiting(payload, size, key if rules.joins else object(), level, num_bytes, now_s, deadline_s)
        self._levels[level - 1][waiting] = None
        self.num_bytes += num_bytes
        if deadline_s is not None:
            self._deadline_s = min(self._deadline_s, deadline_s)
        return waiting

    def remove(self, waiting: Waiting[T]) -> bool:
        """Forgets a request that nobody waits for any more. Returns whether it was still here."""
        level = self._levels[-1] if waiting.is_late else self._levels[waiting.level - 1]
        if waiting not in level:
            return False
        del level[waiting]
        self.num_bytes -= waiting.num_bytes
        return True

    def expire(self, now_s: float) -> list[Waiting[T]]:
        """Requests whose time is over, and that are to be refused: they are gone from here. Others whose time is over
        wait behind all that are not late."""
        if now_s + _EPSILON_S < self._deadline_s:
            return []
        refused: list[Waiting[T]] = []
        for number, level in enumerate(self._levels[:-1], 1):
            late = [one for one in level if one.deadline_s is not None and one.deadline_s <= now_s + _EPSILON_S]
            rejects = self.rules.policy_at(number).rejects_late
            for one in late:
                if rejects:
                    self.remove(one)
                    refused.append(one)
                else:
                    del level[one]
                    one.is_late = True
                    self._levels[-1][one] = None
        self._deadline_s = min(
            (one.deadline_s for one in self._waiting() if one.deadline_s is not None and not one.is_late), default=inf
        )
        return refused

    def take(self, now_s: float) -> Batch[T] | None:
        """The next batch to be executed; None: none is due."""
        for group in self._groups():
            if count := group.due(self._preferred, self.rules.max_queue_delay_s, now_s):
                requests = group.requests[:count]
                for one in requests:
                    self.remove(one)
                return Batch(requests, sum(one.size for one in requests))
        return None

    def next_change_s(self, *, is_busy: bool = False) -> float | None:
        """Time at which a batch is due or a request may time out, if nothing comes before. None: nothing will happen.
        `is_busy`: nobody would take a batch."""
        groups = [] if is_busy else self._groups()
        times = [group.oldest_s + self.rules.max_queue_delay_s for group in groups]
        next_s = min([self._deadline_s, *times])
        return None if next_s == inf else next_s

    # -- inside

    def _waiting(self) -> Iterator[Waiting[T]]:
        """Waiting requests in their order: by level, then by arrival."""
        for level in self._levels:
            yield from level

    def _groups(self) -> list[_Group[T]]:
        """Requests that can go together, in their order. The first request of all leads the first group, and where that
        is full nobody looks further."""
        groups: dict[Hashable, _Group[T]] = {}
        for one in islice(self._waiting(), _MAX_LOOKED_AT):
            group = groups.get(one.key)
            if group is None:
                group = groups[one.key] = _Group(self.rules.max_batch_size, is_first=not groups)
            group.add(one)
            if group.is_full and group.is_first:
                break
        return list(groups.values())


class _Group(Generic[T]):
    """A batch that may still grow."""

    def __init__(self, room: int, *, is_first: bool) -> None:
        self.requests: list[Waiting[T]] = []
        self.is_first = is_first
        self.is_full = False
        self._room = room  # rows

    @property
    def oldest_s(self) -> float:
        return min(one.arrived_s for one in self.requests)

    def add(self, one: Waiting[T]) -> None:
        """One that does not fit closes the group: those behind it do not overtake it."""
        if self.is_full or one.size > self._room:
            self.is_full = True
            return
        self.requests.append(one)
        self._room -= one.size
        self.is_full = not self._room

    def due(self, preferred: tuple[int, ...], delay_s: float, now_s: float) -> int:
        """The number of requests, from the first on, that are to be executed now; 0: it may grow."""
        if self.is_full:
            return len(self.requests)
        size = count = 0
        for number, one in enumerate(self.requests, 1):
            size += one.size
            if size in preferred:
                count = number
        return count or (len(self.requests) if now_s + _EPSILON_S >= self.oldest_s + delay_s else 0)
