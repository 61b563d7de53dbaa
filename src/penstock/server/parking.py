"""A parked replica: its processes live, the device's memory is given back, and no work is taken until it is woken.

One park or wake is under way at a time; the next has its turn after it, and may find that all is as it should be. The
caller may go away: a change that has begun is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from penstock.api.parking import ParkReport
from penstock.core.clock import Clock
from penstock.core.errors import Conflict
from penstock.core.parking import MemoryChange
from penstock.engine.client import EngineClient, EngineState
from penstock.server.drain import Drain

_LOOK_S = 0.01
_PARKED = "this replica is parked"


class Parking:
    def __init__(
        self, engine: EngineClient, drain: Drain, clock: Clock, first_token: Callable[[], Awaitable[float]]
    ) -> None:
        """`first_token`: lets the engine make one, and says how long that took."""
        self._engine = engine
        self._drain = drain
        self._clock = clock
        self._first_token = first_token
        self._turn = asyncio.Lock()
        self._under_way: EngineState | None = None

    @property
    def state(self) -> EngineState:
        """The engine's, but one that is not idle yet is parking already, and one that has made no token is waking."""
        state = self._engine.state
        return self._under_way if self._under_way is not None and state is EngineState.READY else state

    async def park(self, wait_s: float) -> ParkReport:
        """Raises if requests are still open after `wait_s`: the replica goes on then as if nothing had been asked."""
        return await _finished(self._park(wait_s))

    async def wake(self) -> ParkReport:
        return await _finished(self._wake())

    async def _park(self, wait_s: float) -> ParkReport:
        async with self._turn:
            if self._engine.state is EngineState.PARKED:
                return ParkReport(EngineState.PARKED)
            self._drain.check_lasting()
            if self._engine.state is not EngineState.READY:
                raise Conflict(f"the engine is {self._engine.state.value}")
            began_s, was_parked = self._clock.now(), self._drain.parked
            self._drain.parked, self._under_way = "this replica is about to be parked", EngineState.PARKING
            try:
                await self._wait_idle(wait_s)
                drained_s = self._clock.now() - began_s
                change = await self._engine.park()
                was_parked = _PARKED
            finally:
                self._drain.parked, self._under_way = was_parked, None
            return _report(EngineState.PARKED, {"drain": drained_s} | change.seconds, change)

    async def _wake(self) -> ParkReport:
        async with self._turn:
            if not self._drain.parked:
                if self._engine.state is not EngineState.READY:
                    raise Conflict(f"the engine is {self._engine.state.value}")
                return ParkReport(EngineState.READY)
            self._drain.check_lasting()
            is_awake, change = False, MemoryChange()
            self._drain.parked, self._under_way = "this replica is being woken", EngineState.WAKING
            try:
                if self._engine.state is EngineState.PARKED:  # else its process died meanwhile, and a new one is awake
                    change = await self._engine.wake()
                first_token_s = await self._first_token()
                is_awake = True
            finally:
                self._drain.parked, self._under_way = "" if is_awake else _PARKED, None
            return _report(EngineState.READY, change.seconds | {"first_token": first_token_s}, change)

    async def _wait_idle(self, wait_s: float) -> None:
        engine, deadline_s = self._engine, self._clock.now() + wait_s
        while num_open := max(self._drain.num_running, engine.num_open) + engine.embeddings.num_texts:
            if self._clock.now() >= deadline_s:
                raise Conflict(f"it is not parked: {num_open} requests or texts are still open after {wait_s:g} s")
            await asyncio.sleep(_LOOK_S)


def _report(state: EngineState, seconds: dict[str, float], change: MemoryChange) -> ParkReport:
    return ParkReport(state, {phase: round(value, 4) for phase, value in seconds.items()}, change.num_bytes)


async def _finished(change: Coroutine[Any, Any, ParkReport]) -> ParkReport:
    doing = asyncio.ensure_future(change)
    doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to be told
    return await asyncio.shield(doing)
