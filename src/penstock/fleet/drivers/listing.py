"""Replicas of a driver as it last told them.

A driver that fails or hangs is asked ever less often, and holds nobody up: what it told before counts meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from penstock.core.errors import PenstockError
from penstock.fleet.backoff import Backoff
from penstock.fleet.drivers.driver import Driver, DriverReplica

log = logging.getLogger(__name__)


class Listing:
    """Belongs to the event loop."""

    def __init__(self, driver: Driver, *, wait_s: float, timeout_s: float, clock: Callable[[], float]) -> None:
        """`wait_s`: how long one refresh waits. `timeout_s`: a call that takes longer has failed."""
        self._driver = driver
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._clock = clock
        self._call: asyncio.Task[Sequence[DriverReplica]] | None = None
        self._called_at = 0.0
        self._backoff = Backoff()
        self._told_at = -math.inf
        self.blind_s = 0.0  # how long ago it told what counts; 0: in the last refresh
        self.replicas: Mapping[str, DriverReplica] = {}
        self.failure = ""  # why the driver says nothing; empty: it does

    @property
    def num_failures(self) -> int:
        """Calls in a row that failed."""
        return self._backoff.num_failures

    async def refresh(self) -> None:
        now = self._clock()
        self.blind_s = now - self._told_at
        is_new = self._call is None
        if self._call is None:
            if now < self._backoff.until:
                return
            self._call, self._called_at = asyncio.ensure_future(self._driver.list()), now
        await asyncio.wait([self._call], timeout=self._wait_s if is_new else 0)
        if self._call.done():
            call, self._call = self._call, None
            try:
                self.replicas = {one.id: one for one in call.result()}
            except (PenstockError, OSError) as error:
                self._failed(f"the driver cannot list its replicas: {error}", now)
                return
            if self.failure:
                log.info("the driver lists its replicas again")
            self._told_at, self.blind_s, self.failure, self._backoff = now, 0.0, "", Backoff()
        elif now - self._called_at >= self._timeout_s:
            self._call.cancel()
            self._call = None
            self._failed(f"the driver has not listed its replicas within {self._timeout_s:g} s", now)

    def _failed(self, why: str, now: float) -> None:
        self.failure = why
        wait_s = self._backoff.fail(now)
        log.warning("%s; it is asked again in %.0f s", why, wait_s)
