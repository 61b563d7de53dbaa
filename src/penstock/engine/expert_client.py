"""The server's side of a mixture's experts: how many tokens each was given, and that they are to be placed anew."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.core.errors import Conflict, EngineFailed, PenstockError
from penstock.core.expert_load import ExpertLoad
from penstock.engine.messages import ExpertState, RebalanceAnswer, RebalanceExperts, ToEngine

READINGS = 31  # that are kept: of a minute in which tokens were routed


class ExpertClient:
    def __init__(
        self,
        send: Callable[[ToEngine], None],
        check_ready: Callable[[], None],
        as_error: Callable[[str, str], PenstockError],
    ) -> None:
        self._send = send
        self._check_ready = check_ready
        self._as_error = as_error
        self._readings: deque[ExpertLoad] = deque(maxlen=READINGS)
        self._asked: asyncio.Future[RebalanceAnswer] | None = None
        self._rank_imbalance = 0.0  # worked out once a reading: gateways are told of it many times a second

    @property
    def load(self) -> ExpertLoad | None:
        """Load since the engine's start, as it last said; None: it is no mixture, or has said nothing yet."""
        return self._readings[-1] if self._readings else None

    @property
    def recent(self) -> ExpertLoad | None:
        """The load of the last minute in which tokens were routed."""
        if not self._readings:
            return None
        return self._readings[-1].since(self._readings[0]) if len(self._readings) > 1 else self._readings[0]

    @property
    def rank_imbalance(self) -> float:
        """Tokens of the busiest rank by the mean, of late; 0: no experts are shared out."""
        return self._rank_imbalance

    async def rebalance(self) -> RebalanceAnswer:
        """Place the experts anew on all ranks, while requests go on. The caller may go away: it is done all the
        same."""
        self._check_ready()
        if self._asked is not None and not self._asked.done():
            raise Conflict("experts are being rebalanced already")
        self._asked = asyncio.get_running_loop().create_future()
        self._send(RebalanceExperts())
        return await asyncio.shield(self._asked)

    def take(self, message: ExpertState | RebalanceAnswer) -> None:
        if isinstance(message, ExpertState):
            self._readings.append(message.load)
            recent = self.recent
            self._rank_imbalance = recent.rank_imbalance if recent is not None and recent.tokens_by_rank else 0.0
        elif message.code:
            self._fail(self._as_error(message.code, message.message))
        elif self._asked is not None and not self._asked.done():
            self._asked.set_result(message)

    def end(self) -> None:
        """The process is no more, and the next counts from zero."""
        self._readings.clear()
        self._rank_imbalance = 0.0
        self._fail(EngineFailed("the engine process died"))

    def _fail(self, error: PenstockError) -> None:
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(error)
            self._asked.exception()  # whoever asked may be gone
