"""Requests that wait for admission: each is told what was decided, when something has changed or a while has passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from penstock.admission.admission import Admission, Used
from penstock.admission.decision import Decision, Queued, Shed
from penstock.http.clock import Timer, TimerClock
from penstock.router.request import EdgeRequest

_POLL_S = 0.05


class Waiting(Protocol):
    request: EdgeRequest

    def decided(self, decision: Decision) -> None: ...

    def held(self) -> None:
        """It waits, for want of any replica of its model."""


class AdmissionQueue:
    def __init__(self, admission: Admission, clock: TimerClock, give_way: Callable[[str], None]) -> None:
        """`give_way` is told of the pools that somebody has to wait for."""
        self._admission = admission
        self._clock = clock
        self._give_way = give_way
        self._waiting: dict[str, Waiting] = {}
        self._timer: Timer | None = None
        self.arrivals: Counter[str] = Counter()  # by pool, as `refused`
        self.refused: Counter[str] = Counter()
        self.first_held: Callable[[], object] = lambda: None  # told when a request is held and was not before

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, waiting: Waiting) -> None:
        """Asks admission, which decides now or, if the request must wait, later."""
        self.arrivals[waiting.request.model] += 1
        decision = self._admission.submit(waiting.request, self._clock.now())
        if not isinstance(decision, Queued):
            if isinstance(decision, Shed):
                self.refused[waiting.request.model] += 1
            waiting.decided(decision)
            return
        self._give_way(waiting.request.model)
        self._waiting[waiting.request.id] = waiting
        if decision.is_held:
            waiting.held()
            if decision.position == 1:
                self.first_held()
        if self._timer is None:
            self._timer = self._clock.call_later(_POLL_S, self._poll)

    def finished(self, request_id: str, used: Used | None) -> None:
        """A request is over, or leaves its model for another, waiting or not."""
        self._waiting.pop(request_id, None)
        self._admission.finished(request_id, self._clock.now(), used)
        if self._waiting:
            self.decide()

    def decide(self) -> None:
        for decision in self._admission.poll(self._clock.now()):
            waiting = self._waiting.pop(decision.request.id, None)
            if waiting is not None:
                if isinstance(decision, Shed):
                    self.refused[decision.request.model] += 1
                waiting.decided(decision)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        self._timer = None
        self.decide()
        if self._waiting:
            self._timer = self._clock.call_later(_POLL_S, self._poll)
