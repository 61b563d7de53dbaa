"""Places for rows of batches at models: whoever wants one waits for spare capacity, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.gateway.batches.spare import RowPace, Seen


class _Model:
    def __init__(self, pace: RowPace) -> None:
        self.pace = pace
        self.waiting: deque[asyncio.Future[None]] = deque()


class RowSlots:
    """Belongs to the event loop. A batch asks for one place at a time, so several that wait take turns."""

    def __init__(self, max_in_flight: int, look: Callable[[str], Seen]) -> None:
        self._max_in_flight = max_in_flight
        self._look = look
        self._models: dict[str, _Model] = {}

    @property
    def in_flight(self) -> dict[str, int]:
        return {name: model.pace.in_flight for name, model in self._models.items()}

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        await self._take(name)
        try:
            yield
        finally:
            model = self._models[name]
            model.pace.ended()
            self._grant(model)

    def refused(self, name: str) -> None:
        """A row was, for load."""
        self._models[name].pace.refused()

    def tick(self) -> None:
        """Looks at the models that rows are for, and lets rows go."""
        for name, model in self._models.items():
            if model.waiting or model.pace.in_flight:
                model.pace.tick(self._look(name))
                self._grant(model)

    async def _take(self, name: str) -> None:
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = _Model(RowPace(self._max_in_flight))
        if not model.pace.in_flight and not model.waiting:  # nobody has looked for a while
            model.pace.tick(self._look(name))
        place = asyncio.get_running_loop().create_future()
        model.waiting.append(place)
        self._grant(model)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given one in the same moment
                model.pace.ended()
                self._grant(model)
            raise

    def _grant(self, model: _Model) -> None:
        while model.waiting and model.pace.num_free:
            place = model.waiting.popleft()
            if not place.done():
                model.pace.sent()
                place.set_result(None)
