"""Asks one replica how it is, for as long as the gateway runs, and tells its health.

A server that sends no reports is asked over /health or, where that is nothing it knows, /v1/models: both are free.
Deep probes, a real token, are for what reports and answers cannot show: an engine that hangs. Where that is a request
like a client's, it has a journey (`direct_request`); all the others are plain GETs without a body, admission or bill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.core.replica import ReplicaSnapshot, ReplicaState
from penstock.gateway.proxy.direct_request import Asked, ask
from penstock.gateway.replicas.fetch import fetch
from penstock.health.replica_health import ReplicaHealth
from penstock.http import clock as clocks
from penstock.http.call import Failure
from penstock.observe.background import outliving

_SOON_S = 1.0
_UNKNOWN = (404, 405, 501)  # there is no such path
_NO_KEY = 401  # every request would fail as well
_BUSY = 429  # it works, and for somebody


class Probed(Asked, Protocol):
    served_as: str
    health: ReplicaHealth
    snapshot: ReplicaSnapshot


class Prober:
    def __init__(self, replica: Probed, changed: Callable[[], None], *, every_s: float, deep_every_s: float) -> None:
        self._replica = replica
        self._changed = changed
        self._every_s = every_s
        self._deep_every_s = deep_every_s
        self._target = b"/health"
        self._clock = replica.upstream.clock

    async def watch_server(self) -> None:
        """For ever. One that failed is asked again soon, then ever more rarely: three in a row take seconds."""
        health = self._replica.health
        deep_at = self._clock.now() + self._deep_every_s if self._deep_every_s else float("inf")
        soon_s = _SOON_S
        while True:
            is_deep = self._clock.now() >= deep_at  # until one passes: a shallow one would hide what it found
            is_well = False
            with outliving("replica prober"):
                is_well = await (self._completes() if is_deep else self._answers())
                if is_well and is_deep:
                    deep_at = self._clock.now() + self._deep_every_s
                self._tell(is_well)
            soon_s = _SOON_S if is_well or health.is_in else 2 * soon_s
            await clocks.sleep(self._clock, self._every_s if is_well and health.is_in else min(soon_s, self._every_s))

    async def watch_engine(self) -> None:
        """For ever. A penstock replica: it is asked when it has been idle for long, and when it is out for hanging."""
        replica, health = self._replica, self._replica.health
        steps, stepped_at = -1, self._clock.now()
        while True:
            await clocks.sleep(self._clock, _SOON_S)
            if health.is_in:
                if replica.snapshot.load.steps != steps:
                    steps, stepped_at = replica.snapshot.load.steps, self._clock.now()
                is_due = self._clock.now() - stepped_at >= self._deep_every_s > 0
                if not is_due or replica.snapshot.state is not ReplicaState.READY:
                    continue
            with outliving("replica prober"):
                is_well = await self._engine_steps()
                if is_well:
                    stepped_at = self._clock.now()
                self._tell(is_well)

    def _tell(self, is_well: bool) -> None:
        self._replica.health.probed(is_well)
        self._changed()

    async def _answers(self) -> bool:
        """Any answer is one but that it fails, or does not know us."""
        while True:
            status = await self._get(self._target)
            if status in _UNKNOWN and self._target == b"/health":
                self._target = b"/v1/models"
                continue
            return status is not None and status < 500 and status != _NO_KEY

    async def _engine_steps(self) -> bool:
        return await self._get(b"/health/deep", is_deep=True) == 200

    async def _completes(self) -> bool:
        wanted = {"model": self._replica.served_as, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1}
        timeout_s = self._replica.health.settings.deep_probe_timeout_s
        answer = await ask(self._replica, b"/v1/chat/completions", msgspec.json.encode(wanted), timeout_s=timeout_s)
        return answer is not None and answer[0] in (200, _BUSY)

    async def _get(self, target: bytes, *, is_deep: bool = False) -> int | None:
        """The status of the answer; None: there was none, or not all of it in time."""
        replica, settings = self._replica, self._replica.health.settings
        timeout_s = settings.deep_probe_timeout_s if is_deep else settings.probe_timeout_s
        answer = await fetch(replica.upstream, target, replica.headers, timeout_s=timeout_s)
        return None if isinstance(answer, Failure) else answer.status
