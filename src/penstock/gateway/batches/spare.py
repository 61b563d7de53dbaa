"""Spare capacity: how many rows of batches may be at a model's replicas. Pure: it reads no clock and touches no socket.

    pace = RowPace(max_in_flight=64, busy=0.5)
    pace.tick(seen)                  # several times a second
    if pace.num_free: ...            # one more may be sent

The rule. A row is sent only while no request of a higher class waits, and only if a replica has room below the share
`busy`: of its places, of its KV blocks, and of the time to first token that is promised (what waits before a new prompt
there). Rows also end where a step takes a twentieth of that time: whoever comes waits for the step under way. The
number in flight starts at one and grows by one with each look that finds room; a look that finds somebody waiting, or a
row that is refused for load, halves it. So rows fill slowly what stays free, and leave it fast. They are in the lowest
class besides, at the gateway and in the engine: whatever comes goes before all that wait, steps that compute its prompt
are made without them, and an engine that is full takes their blocks first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import floor
from typing import NamedTuple

from penstock.core.replica import ReplicaSnapshot, ReplicaState

_STEP_SHARE = 0.05  # of the objective for the time to first token


class Seen(NamedTuple):
    """The state of a model at one moment."""

    num_waiting: int  # requests of higher classes, for a place
    room: int  # rows that its replicas have room for, beside all that they have
    is_cold: bool = False  # it has no replica now, and requests for it are held until one starts


class RowPace:
    """The pace of one model's rows."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight = max_in_flight
        self._limit = 1
        self._seen = Seen(0, 0)
        self.in_flight = 0
        self._sent = 0  # since the last look: room that is taken, and not yet seen

    @property
    def limit(self) -> int:
        """Rows that may be in flight now; more than that may still be, and end."""
        if self._seen.num_waiting:
            return 0
        if self._seen.is_cold:
            return 1  # it tells whoever starts replicas that there is work
        return min(self._limit, self.in_flight + max(0, self._seen.room - self._sent))

    @property
    def num_free(self) -> int:
        return max(0, self.limit - self.in_flight)

    def tick(self, seen: Seen) -> None:
        self._seen, self._sent = seen, 0
        if seen.num_waiting:
            self.refused()
        elif seen.room and self.in_flight >= self._limit:
            self._limit = min(self._limit + 1, self._max_in_flight)

    def sent(self) -> None:
        self.in_flight += 1
        self._sent += 1

    def ended(self) -> None:
        self.in_flight -= 1

    def refused(self) -> None:
        """Somebody waits, or a row was refused for load."""
        self._limit = max(1, min(self._limit, self.in_flight) // 2)


def room(replicas: Iterable[ReplicaSnapshot], ttft_s: float, busy: float, now: float) -> int:
    """Rows that replicas have room for below the share `busy` of what they have."""
    return sum(_room_at(replica, ttft_s, busy) for replica in replicas if _takes_work(replica, now))


def _takes_work(replica: ReplicaSnapshot, now: float) -> bool:
    return replica.state_at(now) is ReplicaState.READY and not replica.is_tripped


def _room_at(replica: ReplicaSnapshot, ttft_s: float, busy: float) -> int:
    if replica.queue_s > busy * ttft_s or replica.step_s > _STEP_SHARE * ttft_s:
        return 0
    if replica.kv_used_tokens > busy * replica.share * replica.limits.kv_capacity_tokens:
        return 0
    places = busy * replica.share * replica.max_sequences
    if places < 1.0:  # a replica of one place is free, or it is not
        return int(replica.sequences == 0)
    return max(0, floor(places) - replica.sequences)
