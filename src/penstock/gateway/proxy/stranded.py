"""Streams that have begun and have no replica to go on at: each waits until one comes back, or until its time is up.

A stream strands when the last replica of its model is lost, or when it has lost two and may go to no third
(`quarantine`). Its client sees a pause instead of an error, if a replica is back in time. Where a controller keeps the
model's replicas, that is as long as it lets requests wait for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Protocol

from penstock.core.replica import ReplicaState
from penstock.gateway.replicas.replica import Replica
from penstock.http.clock import Timer, TimerClock
from penstock.router.request import EdgeRequest

WAIT_S = 30.0


class Stream(Protocol):
    request: EdgeRequest

    def forget_tries(self, lost: Set[str]) -> None:
        """Replicas that were lost since it tried them are worth another try when they are back."""

    def replica_back(self) -> bool:
        """Looks for a replica again. Returns whether one has it now, or it has ended."""

    def waited_enough(self) -> None:
        """Ends it with an error."""


class StrandedStreams:
    def __init__(
        self,
        replicas: Mapping[str, Replica],
        clock: TimerClock,
        wait_s: float = WAIT_S,
        hold_s: Callable[[str, float], float] = lambda model, now: 0.0,
    ) -> None:
        """`hold_s`: how long requests of a model may wait for a replica, by now."""
        self._hold_s = hold_s
        self._replicas = replicas
        self._clock = clock
        self._wait_s = wait_s
        self._timers: dict[Stream, Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, stream: Stream) -> None:
        if stream in self._timers:
            return
        replicas, now = self._replicas.values(), self._clock.now()
        stream.forget_tries({one.id for one in replicas if one.snapshot.state_at(now) is ReplicaState.OUT})
        wait_s = max(self._wait_s, self._hold_s(stream.request.model, now))
        self._timers[stream] = self._clock.call_later(wait_s, self._give_up, stream)

    def discard(self, stream: Stream) -> None:
        if (timer := self._timers.pop(stream, None)) is not None:
            timer.cancel()

    def replica_changed(self, replica: Replica) -> None:
        is_out = replica.snapshot.state is ReplicaState.OUT
        for stream in [one for one in self._timers if one.request.model == replica.model]:
            if is_out:
                stream.forget_tries({replica.id})
            elif stream.replica_back():
                self.discard(stream)

    def _give_up(self, stream: Stream) -> None:
        del self._timers[stream]
        stream.waited_enough()
