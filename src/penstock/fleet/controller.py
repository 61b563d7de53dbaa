"""The controller: observe, decide, act, record, once a second, for as long as it holds the fleet's lease.

Everything is written before it is done: a replica's row stands in the store before its driver is asked to start it. So
a controller that dies at any moment leaves a successor nothing to guess; it reads the rows, asks the driver what there
is, and goes on. Without a controller everything goes on as it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.api.relay import SECRET_VARIABLE
from penstock.api.replica_report import ReplicaReport
from penstock.core.config import build
from penstock.core.errors import CapacityRefused, LeaseLost, PenstockError, StoreUnavailable
from penstock.core.settings import ServerSettings, Settings
from penstock.core.slo import Slo
from penstock.fleet.drivers.driver import Driver, DriverReplica, ReplicaSpec
from penstock.fleet.lease import LeaseKeeper
from penstock.fleet.lifecycle import Command, Facts, Next, advance
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import CapacityType, ReplicaState
from penstock.fleet.pool import Pool
from penstock.fleet.replica_client import ReplicaClient
from penstock.fleet.settings import FleetSettings, PoolSettings
from penstock.observe.background import outliving
from penstock.observe.redaction import redact
from penstock.tenancy import fleet as rows
from penstock.tenancy.database import Execute
from penstock.tenancy.fleet import FleetReplica, PoolStatus
from penstock.tenancy.replicas import RESTING, ReplicaRow
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

_SAMPLE_S = 60.0
_FOLLOWER_S = 1.0  # between two looks at a lease that another controller holds
_STOP_GRACE_S = 30.0
_ID_BYTES = 5
_SEEN_BY_GATEWAYS = frozenset(
    {
        ReplicaState.ACTIVE,
        ReplicaState.STANDBY,
        ReplicaState.DRAINING,
        ReplicaState.PARKING,
        ReplicaState.PARKED,
        ReplicaState.WAKING,
    }
)


class _Done(NamedTuple):
    command: Command
    failure: str
    seconds: float


class Controller:
    def __init__(
        self,
        settings: FleetSettings,
        store: Store,
        driver: Driver,
        client: ReplicaClient,
        *,
        holder: str | None = None,
        is_alone: bool = False,
        clock: Callable[[], float] = time.time,
        on_change: Callable[[Sequence[PoolStatus]], None] = lambda _: None,
        on_failure: Callable[[FleetReplica, str], None] = lambda row, why: None,
    ) -> None:
        """`is_alone`: no other controller of this fleet can be running. `on_change` is told of the pools after each
        round, `on_failure` of each replica that is lost, and why."""
        self._settings = settings
        self._store = store
        self._book = store.fleet
        self._by = f"fleet {settings.name}"
        self._driver = driver
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._on_failure = on_failure
        holder = holder or secrets.token_hex(8)
        self._keeper = LeaseKeeper(
            store.fleet, settings.name, holder, settings.lease_s, time.monotonic, is_alone=is_alone
        )
        self._pools: dict[str, Pool] = {}
        self._rows: dict[str, FleetReplica] = {}
        self._stored: dict[str, FleetReplica] = {}  # rows as the store has them
        self._members: dict[str, ReplicaRow] = {}  # as gateways were told, by URL
        self._running: dict[str, asyncio.Task[None]] = {}  # commands, by replica
        self._done: dict[str, _Done] = {}
        self._heard_at: dict[str, float] = {}
        self._reports: dict[str, ReplicaReport] = {}
        self._wanted: dict[str, int] = {}  # by pool, as last recorded
        self._sampled_at = 0.0

    async def run(self) -> None:
        """Until it is cancelled. A controller that is not the leader waits for its turn."""
        try:
            while True:
                with outliving("fleet controller"):
                    try:
                        if await self.try_lead():
                            await self._lead()
                    except LeaseLost as error:
                        log.warning("%s; this controller waits for its turn", error.message)
                    except StoreUnavailable as error:
                        log.warning("the fleet stays as it is: %s", error.message)
                await self._drop_commands()
                await asyncio.sleep(_FOLLOWER_S)
        finally:
            await self._drop_commands()
            await asyncio.to_thread(self._keeper.release)

    @property
    def is_leader(self) -> bool:
        return self._keeper.lease is not None

    async def stop_all(self, grace_s: float) -> None:
        """Takes every replica from the gateways and ends it; for an operator who has ended the controllers."""
        while not await asyncio.to_thread(self._keeper.try_take):  # noqa: ASYNC110 - another process has it
            await asyncio.sleep(_FOLLOWER_S)  # another's lease expires
        found = [row for row in await asyncio.to_thread(self._book.replicas) if row.fleet == self._settings.name]
        told = [row for row in await asyncio.to_thread(self._store.replicas.all) if row.by == self._by]
        with self._book.fenced(self._settings.name, self._keeper.held) as execute:
            self._book.write_members(execute, (), told)
        listed = await self._driver.list()
        await asyncio.gather(
            *(self._driver.stop(one, grace_s) for one in {*(r.id for r in found), *(r.id for r in listed)})
        )
        with self._book.fenced(self._settings.name, self._keeper.held) as execute:
            for row in found:
                rows.remove_replica(execute, row.id)
            for name in self._settings.pools:
                rows.remove_pool(execute, name)
        self._keeper.release()

    # -- leading

    async def try_lead(self) -> bool:
        """Whether this controller acts from now on: it has the lease, and knows what its predecessor left."""
        if not await asyncio.to_thread(self._keeper.try_take):
            return False
        await self._take_over()
        log.info("this controller leads the fleet '%s' of %d replicas", self._settings.name, len(self._rows))
        return True

    async def _lead(self) -> None:
        while True:
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(0.0, self._settings.every_s - (time.monotonic() - began)))

    async def _take_over(self) -> None:
        """Goes on from the store's rows. What the driver has and no row names was left by a controller that died while
        it stopped a replica."""
        self._pools = {
            name: Pool(name, one, self._settings.slo_of(name, one))
            for name, one in self._settings.pool_settings().items()
        }
        found = await asyncio.to_thread(self._book.replicas)
        self._stored = {row.id: row for row in found if row.fleet == self._settings.name}
        self._rows = dict(self._stored)
        told = await asyncio.to_thread(self._store.replicas.all)
        self._members = {row.url: row for row in told if row.by == self._by}
        self._done, now = {}, self._clock()
        self._heard_at = dict.fromkeys(self._rows, now)
        for name, pool in self._pools.items():
            pool.restore(await asyncio.to_thread(self._book.memory, name), now)
        await asyncio.to_thread(self._remove_unnamed_pools)
        for orphan in await self._driver.list():
            if orphan.id not in self._rows:
                log.warning("replica %s belongs to nobody; it is stopped", orphan.id)
                self._begin(orphan.id, Command.STOP, self._stop(orphan.id, 0.0))

    def _remove_unnamed_pools(self) -> None:
        """The file names them no longer."""
        own = (one.pool for one in self._book.pools() if one.fleet == self._settings.name)
        unnamed = [name for name in own if name not in self._pools]
        if unnamed:
            with self._book.fenced(self._settings.name, self._keeper.held) as execute:
                for name in unnamed:
                    rows.remove_pool(execute, name)

    async def step(self) -> None:
        """One round: observe, decide, record, act. Raises LeaseLost or StoreUnavailable, and has then begun nothing."""
        listed = {one.id: one for one in await self._driver.list()}
        demand, _ = await asyncio.gather(asyncio.to_thread(self._book.demand), self._read_reports())
        now = self._clock()
        commands = self._advance(listed, now)
        decisions: list[Decision] = []
        statuses: list[PoolStatus] = []
        for name, pool in self._pools.items():
            pool.observe_demand([row for row in demand if row.pool == name], now)
            observation = pool.observation(self._of_pool(name), self._reports, now)
            decision = pool.decide(observation, now)
            for action in decision.actions:
                self._take(pool, action, now)
            decisions.append(decision)
            statuses.append(replace(pool.status(decision, self._of_pool(name), now), fleet=self._settings.name))
        commands |= self._advance(listed, now)  # what was decided begins in the same round
        await self._record(decisions, statuses, now)
        for replica_id, command in commands.items():
            self._give(replica_id, command)
        self._on_change(statuses)

    def _advance(self, listed: Mapping[str, DriverReplica], now: float) -> dict[str, Command]:
        commands: dict[str, Command] = {}
        for row in list(self._rows.values()):
            pool = self._pools.get(row.pool)
            if pool is None:  # the file no longer names its pool
                row = replace(row, target=ReplicaState.STOPPING)
            settings = pool.settings if pool is not None else _NO_POOL
            done = self._done.pop(row.id, None)
            facts = Facts(
                listed.get(row.id),
                self._reports.get(row.id),
                self._heard_at.get(row.id, row.created_at),
                done.command if done is not None else None,
                done.failure if done is not None else "",
            )
            step = advance(row, facts, settings, now)
            if pool is not None:
                self._measure(pool, row, step, now)
            if step.row is None:
                self._forget(row)
                continue
            self._rows[row.id] = step.row
            if step.command is not None and row.id not in self._running:
                commands[row.id] = step.command
        return commands

    def _measure(self, pool: Pool, row: FleetReplica, step: Next, now: float) -> None:
        """Durations of changes of state, and failures."""
        if step.failure:
            log.warning("replica %s of %s is lost: %s", row.id, row.pool, redact(step.failure))
            self._on_failure(row, step.failure)
            if row.ready_at is None:
                wait_s = pool.start_failed(now, redact(step.failure))
                log.warning("the next start of %s is in %.0f s at the earliest", row.pool, wait_s)
            else:
                pool.count("lost")
        if step.row is None or step.row.state == row.state:
            return
        if row.state == ReplicaState.STARTING and step.row.ready_at is not None:
            pool.start_succeeded()
            pool.durations.add("start_s", now - row.created_at)
        elif not step.failure and (name := _MEASURED.get(ReplicaState(row.state))) is not None:
            pool.durations.add(name, now - row.since)

    def _take(self, pool: Pool, action: Action, now: float) -> None:
        """An action of the policy becomes a target in a replica's row."""
        if action.kind is ActionKind.START:
            price = pool.settings.price_per_hour
            if action.capacity_type is CapacityType.SPOT:
                price = pool.settings.spot.price_per_hour
            if (limit := self._settings.spend_per_hour) is not None and self._spend_per_hour() + price > limit:
                wait_s = pool.start_failed(now, f"the fleet may spend {limit:g} an hour")
                log.warning(
                    "%s gets no other replica for %.0f s: the fleet may spend %g an hour", pool.name, wait_s, limit
                )
                return
            row = FleetReplica(
                f"{pool.name.replace('@', '-').replace('/', '-')}-{secrets.token_hex(_ID_BYTES)}",
                pool.name,
                ReplicaState.STARTING,
                now,
                target=action.to,
                zone=action.zone,
                capacity_type=action.capacity_type,
                price_per_hour=price,
                created_at=now,
                fleet=self._settings.name,
            )
            self._rows[row.id] = row
            return
        found = self._rows.get(action.replica)
        if found is None:
            return
        target = {
            ActionKind.WAKE: action.to,
            ActionKind.ACTIVATE: ReplicaState.ACTIVE,
            ActionKind.DEACTIVATE: ReplicaState.STANDBY,
            ActionKind.PARK: ReplicaState.PARKED,
            ActionKind.STOP: ReplicaState.STOPPING,
        }[action.kind]
        self._rows[found.id] = replace(found, target=target)

    # -- recording

    async def _record(self, decisions: list[Decision], statuses: list[PoolStatus], now: float) -> None:
        seen = (row for row in self._rows.values() if row.state in _SEEN_BY_GATEWAYS and row.url)
        members = {row.url: self._member(row, now) for row in seen}
        told = [row for url, row in members.items() if _differs(self._members.get(url), row)]
        gone = [row for url, row in self._members.items() if url not in members]
        current = dict(self._rows)
        changed = [row for row in current.values() if self._stored.get(row.id) != row]
        removed = [id for id in self._stored if id not in current]
        kept = [one for one in decisions if one.actions or self._wanted.get(one.pool) != one.wanted]
        sampled = now - self._sampled_at >= _SAMPLE_S
        began, lease = time.monotonic(), self._keeper.held

        def write() -> None:
            with self._book.fenced(self._settings.name, lease) as execute:
                for row in changed:
                    rows.write_replica(execute, row)
                for id in removed:
                    rows.remove_replica(execute, id)
                if told or gone:
                    self._book.write_members(execute, told, gone)
                for status in statuses:
                    rows.write_pool(execute, status)
                for decision in kept:
                    rows.write_decision(execute, decision.at, decision.pool, decision)
                if sampled:
                    self._write_sample(execute, decisions, now)

        await asyncio.to_thread(write)
        self._keeper.renewed(began)
        self._members, self._stored = members, current
        self._wanted |= {one.pool: one.wanted for one in decisions}
        if sampled:
            self._sampled_at = now
        for one in kept:
            for action in one.actions:
                log.info("%s: %s %s: %s", one.pool, action.kind, action.replica or "a replica", action.reason)

    def _write_sample(self, execute: Execute, decisions: list[Decision], now: float) -> None:
        for decision in decisions:
            pool = self._pools[decision.pool]
            rows.write_sample(execute, pool.sample(decision, self._of_pool(decision.pool), now))
            for name, document in pool.to_keep().items():
                rows.write_memory(execute, decision.pool, name, document)

    # -- acting

    def _give(self, replica_id: str, command: Command) -> None:
        row = self._rows.get(replica_id)
        if row is None or replica_id in self._running:
            return
        match command:
            case Command.START:
                coroutine = self._start(row)
            case Command.PROBE:
                coroutine = self._probe(row.url)
            case Command.PARK:
                coroutine = self._client.park(row.url)
            case Command.WAKE:
                coroutine = self._client.wake(row.url)
            case Command.STOP:
                grace_s = _STOP_GRACE_S if not row.failure else 0.0
                if row.deadline is not None:
                    grace_s = max(0.0, min(grace_s, row.deadline - self._clock()))
                coroutine = self._stop(row.id, grace_s)
        self._begin(replica_id, command, coroutine)

    def _begin(self, replica_id: str, command: Command, coroutine: Awaitable[str]) -> None:
        async def run() -> None:
            began = time.monotonic()
            try:
                failure = await coroutine
            except PenstockError as error:
                failure = error.message
            except OSError as error:
                failure = str(error)
            finally:
                self._running.pop(replica_id, None)
            self._done[replica_id] = _Done(command, failure, time.monotonic() - began)

        self._running[replica_id] = asyncio.create_task(run())

    async def _start(self, row: FleetReplica) -> str:
        pool = self._pools[row.pool]
        spec = ReplicaSpec(
            row.id,
            row.pool,
            replica_settings(pool.name, pool.settings, pool.slo),
            zone=row.zone,
            capacity_type=CapacityType(row.capacity_type),
            gpus=pool.settings.gpus,
        )
        try:
            await self._driver.start(spec)
        except CapacityRefused as error:
            kind = CapacityType(row.capacity_type)
            pool.start_failed(self._clock(), redact(error.message), zone=row.zone, capacity_type=kind)
            where = f" in {row.zone}" if row.zone else ""
            log.warning("no %s capacity for %s%s: %s", kind, row.pool, where, error.message)
            self._rows.pop(row.id, None)
            return error.message
        return ""

    async def _probe(self, url: str) -> str:
        return "" if await self._client.makes_token(url) else "no token came out"

    async def _stop(self, replica_id: str, grace_s: float) -> str:
        await self._driver.stop(replica_id, grace_s)
        return ""

    async def _drop_commands(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._running.clear()

    # -- inside

    async def _read_reports(self) -> None:
        wanted = [row for row in self._rows.values() if row.url and row.state != ReplicaState.STOPPING]
        found = await asyncio.gather(*(self._client.report(row.url) for row in wanted))
        now = self._clock()
        for row, report in zip(wanted, found, strict=True):
            if report is None:
                self._reports.pop(row.id, None)
            else:
                self._reports[row.id] = report
                self._heard_at[row.id] = now

    def _member(self, row: FleetReplica, now: float) -> ReplicaRow:
        """Row of a replica for gateways."""
        return ReplicaRow(
            row.pool,
            row.url,
            row.state != ReplicaState.ACTIVE,
            {"secret_env": SECRET_VARIABLE},
            by=self._by,
            at=now,
            state=row.state if row.state in RESTING else "",
        )

    def _spend_per_hour(self) -> float:
        return sum(self._pools[row.pool].price_of(row) for row in self._rows.values() if row.pool in self._pools)

    def _of_pool(self, name: str) -> list[FleetReplica]:
        return [row for row in self._rows.values() if row.pool == name]

    def _forget(self, row: FleetReplica) -> None:
        del self._rows[row.id]
        self._reports.pop(row.id, None)
        self._heard_at.pop(row.id, None)
        if row.url:
            self._client.forget(row.url)


_MEASURED = {
    ReplicaState.WAKING: "wake_s",
    ReplicaState.PARKING: "park_s",
    ReplicaState.DRAINING: "drain_s",
}
_NO_POOL = PoolSettings()


def replica_settings(pool: str, settings: PoolSettings, slo: Slo) -> Settings:
    """Settings of a replica of a pool. Replicas on CPUs share the cores out, as many as there may be."""
    engine = settings.engine
    if engine.threads is None and not settings.gpus:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        engine = dataclasses.replace(engine, threads=max(1, cores // settings.max))
    server = build(ServerSettings, {"name": pool, **settings.server}, where=f"pools.{pool}.server.")
    return Settings(settings.model, engine, server, slo)


def _differs(told: ReplicaRow | None, row: ReplicaRow) -> bool:
    return told is None or replace(told, at=row.at) != row
