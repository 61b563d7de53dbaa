"""The loop that asks one replica how it is, and tells its health. How it is asked is the dialect's affair."""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.core.clock import Clock
from penstock.gateway.health.replica_health import ReplicaHealth

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0
DEEP_TIMEOUT_S = 15.0


class Probed(Protocol):
    """A replica that can be asked. False or an exception: it is not well."""

    async def is_ready(self) -> bool: ...

    async def is_draining(self) -> bool:
        """Asked when it is not ready."""

    async def makes_a_token(self) -> bool: ...


class Prober:
    """After a failure it asks sooner, so that three in a row take seconds, not a minute."""

    def __init__(
        self, replica: Probed, health: ReplicaHealth, clock: Clock, *,
        every_s: float = PROBE_EVERY_S, timeout_s: float = PROBE_TIMEOUT_S, deep_timeout_s: float = DEEP_TIMEOUT_S,
    ) -> None:  # fmt: skip
        self._replica = replica
        self._health = health
        self._clock = clock
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._deep_timeout_s = deep_timeout_s

    async def run(self) -> None:
        """For ever; the task group it runs in ends it."""
        while True:
            is_well = await self.probe()
            await asyncio.sleep(self._every_s if is_well else self._every_s / 4)

    async def probe(self) -> bool:
        return await (self._ask_deep() if self._health.needs_deep_probe else self._ask())

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                if await self._replica.is_ready():
                    self._health.probe_passed(self._clock.now())
                    return True
                if await self._replica.is_draining():
                    self._health.draining()
                    return True
        except Exception:  # whatever goes wrong in asking: an answer in itself
            pass
        self._health.probe_failed(self._clock.now())
        return False

    async def _ask_deep(self) -> bool:
        try:
            async with asyncio.timeout(self._deep_timeout_s):
                is_well = await self._replica.makes_a_token()
        except Exception:
            is_well = False
        if is_well:
            self._health.deep_probe_passed(self._clock.now())
        return is_well
