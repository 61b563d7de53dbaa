"""A thread that writes this gateway's demand into the store, and hands on what controllers say of pools there.

Pools that a controller manages are written every second; all others rarely, so that a gateway without a fleet hardly
writes. While the store does not answer, demand is counted on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from penstock.core.errors import StoreUnavailable
from penstock.gateway.demand.meter import DemandMeter, Reading
from penstock.gateway.demand.tally import DemandTally
from penstock.http.clock import Timer, TimerClock
from penstock.observe.background import Worker, outliving
from penstock.tenancy.fleet import FleetBook, PoolStatus

log = logging.getLogger(__name__)

EVERY_S = 1.0
RARELY_S = 10.0
_SOON_S = 0.1  # between two reports, at least
SILENT_AFTER_S = 30.0  # a pool whose status is older has no controller
_NAME = "demand reporter"


class DemandReporter:
    """Give it a store of its own: its writes wait for others'. Works from `start` to `close`."""

    def __init__(
        self,
        fleet: FleetBook,
        meter: DemandMeter,
        clock: TimerClock,
        apply: Callable[[Mapping[str, PoolStatus]], object] = lambda _: None,
    ) -> None:
        """`apply` is told in the event loop what controllers last said, by pool."""
        self._fleet = fleet
        self._meter = meter
        self._clock = clock
        self._apply = apply
        self.gateway = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._tally = DemandTally(self.gateway)
        self._readings: SimpleQueue[Reading | None] = SimpleQueue()
        self._managed: set[str] = set()
        self._wrote_all_at = float("-inf")
        self._is_silent = False  # the store, as was told
        self._timer: Timer | None = None
        self._ticked_at = 0.0
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._worker: Worker | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._worker = Worker(_NAME, self._thread.is_alive)
        self._tick()

    def close(self) -> None:
        """Its rows are taken back: nobody need wait until they are stale."""
        if self._timer is not None:
            self._timer.cancel()
        if self._worker is not None:
            self._worker.stop()
            self._readings.put(None)
            self._thread.join()

    def report_now(self) -> None:
        """A request is held: its controller should know before the second is over."""
        if self._timer is not None and self._clock.now() - self._ticked_at >= _SOON_S:
            self._timer.cancel()
            self._tick()

    def _tick(self) -> None:
        self._ticked_at = self._clock.now()
        self._readings.put(self._meter.read())
        self._timer = self._clock.call_later(EVERY_S, self._tick)

    def _run(self) -> None:
        while (reading := self._readings.get()) is not None:
            with outliving(_NAME):
                self._report(reading)
        with outliving(_NAME):
            try:
                self._fleet.remove_demand(self.gateway)
            except StoreUnavailable as error:
                log.info("the demand of this gateway stays in the store until it is stale: %s", error.message)

    def _report(self, reading: Reading) -> None:
        rows = self._tally.add(reading)
        if not self._readings.empty():  # the store took its time: only the newest is worth writing
            return
        is_whole = reading.now - self._wrote_all_at >= RARELY_S
        due = rows if is_whole else [row for row in rows if row.pool in self._managed]
        try:
            found = self._fleet.write_demand(due) if due else {one.pool: one for one in self._fleet.pools()}
        except StoreUnavailable as error:
            if not self._is_silent:
                self._is_silent = True
                log.warning("controllers do not see the demand of this gateway: %s", error.message)
            return
        self._is_silent = False
        if is_whole:
            self._wrote_all_at = reading.now
        self._managed = {pool for pool, one in found.items() if reading.at - one.at < SILENT_AFTER_S}
        self._loop.call_soon_threadsafe(self._apply, found)
