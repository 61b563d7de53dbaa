"""Commands to drivers and replicas, carried out beside the controller's rounds: at most one at a time for each replica.

An outcome is kept until the controller takes it. A command that fails is tried again ever later, and one that is
dropped is given again by the next leader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from penstock.core.errors import CapacityRefused, PenstockError
from penstock.fleet.backoff import Backoff
from penstock.fleet.drivers.driver import Driver, ReplicaSpec
from penstock.fleet.lifecycle import Command
from penstock.fleet.replica_client import ReplicaClient
from penstock.tenancy.fleet import FleetReplica

log = logging.getLogger(__name__)

_STOP_GRACE_S = 30.0
_MAX_BACKOFF_S = 60.0


class Outcome(NamedTuple):
    command: Command
    failure: str = ""  # empty: it did what it should
    is_refused: bool = False  # a driver has no capacity of this kind


class CommandRunner:
    """Belongs to the event loop."""

    def __init__(
        self,
        driver: Driver,
        client: ReplicaClient,
        spec_of: Callable[[FleetReplica], ReplicaSpec],
        clock: Callable[[], float],
        driver_timeout_s: float,
    ) -> None:
        """`clock`: seconds since 1970, as in rows. `driver_timeout_s`: a driver's call that takes longer has failed."""
        self._driver = driver
        self._client = client
        self._spec_of = spec_of
        self._clock = clock
        self._driver_timeout_s = driver_timeout_s
        self._backoffs: dict[tuple[str, Command], Backoff] = {}
        self._outcomes: dict[str, Outcome] = {}
        self.running: dict[str, asyncio.Task[None]] = {}  # by replica

    def give(self, row: FleetReplica, command: Command) -> None:
        """Begins a command, unless one runs for this replica, or it failed a moment ago."""
        backoff = self._backoffs.get((row.id, command))
        if row.id not in self.running and (backoff is None or backoff.until <= self._clock()):
            self.running[row.id] = asyncio.create_task(self._run(row, command))

    def take_outcome(self, replica_id: str) -> Outcome | None:
        return self._outcomes.pop(replica_id, None)

    async def drop(self) -> None:
        """Cancels all of them."""
        tasks = [*self.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.running.clear()
        self._outcomes.clear()

    async def _run(self, row: FleetReplica, command: Command) -> None:
        try:
            outcome = Outcome(command, await self._carry_out(row, command) or "")
        except PenstockError as error:
            outcome = Outcome(command, error.message, isinstance(error, CapacityRefused))
        except OSError as error:
            outcome = Outcome(command, str(error))
        finally:
            self.running.pop(row.id, None)
        self._outcomes[row.id] = outcome
        if outcome.failure:
            backoff = self._backoffs.setdefault((row.id, command), Backoff(_MAX_BACKOFF_S))
            wait_s = backoff.fail(self._clock())
            log.info("replica %s: %s failed, not again within %.0f s: %s", row.id, command, wait_s, outcome.failure)
        elif command is Command.STOP:
            self._backoffs = {key: one for key, one in self._backoffs.items() if key[0] != row.id}

    def _carry_out(self, row: FleetReplica, command: Command) -> Awaitable[str | None]:
        """Returns why it failed, or raises that."""
        match command:
            case Command.START:
                return self._start(row)
            case Command.PROBE:
                return self._probe(row)
            case Command.PARK:
                return self._client.park(row.url)
            case Command.WAKE:
                return self._client.wake(row.url)
            case Command.ROLE:
                return self._client.set_role(row.url, self._spec_of(row).settings.server.role)
            case Command.STOP:
                return self._stop(row)

    async def _start(self, row: FleetReplica) -> str:
        return await self._within(self._driver_timeout_s, self._driver.start(self._spec_of(row)))

    async def _probe(self, row: FleetReplica) -> str:
        return "" if await self._client.makes_token(row.url) else "no token came out"

    async def _stop(self, row: FleetReplica) -> str:
        grace_s = _STOP_GRACE_S if not row.failure else 0.0
        if row.deadline is not None:
            grace_s = max(0.0, min(grace_s, row.deadline - self._clock()))
        return await self._within(grace_s + self._driver_timeout_s, self._driver.stop(row.id, grace_s))

    @staticmethod
    async def _within(seconds: float, call: Awaitable[None]) -> str:
        try:
            async with asyncio.timeout(seconds):
                await call
        except TimeoutError:
            return f"the driver did not answer within {seconds:g} s"
        return ""
