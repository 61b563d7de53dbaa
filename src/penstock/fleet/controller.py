"""The controller: observe, decide, record, act, once a second, for as long as it holds the fleet's lease.

Everything is written before it is done: a replica's row stands in the store before its driver is asked to start it. So
a controller that dies at any moment leaves a successor nothing to guess; it reads the rows, asks the driver what there
is, and goes on. Without a controller everything goes on as it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock.api.replica_report import ReplicaReport
from penstock.core.errors import ConfigError, LeaseLost, PoolTaken, StoreUnavailable
from penstock.fleet.command_runner import CommandRunner
from penstock.fleet.drivers.driver import Driver, NotingDriver, ReplicaNote, ReplicaSpec
from penstock.fleet.drivers.listing import Listing
from penstock.fleet.lifecycle import Command, Facts, advance
from penstock.fleet.policy.decision import Action, ActionKind
from penstock.fleet.policy.observation import PoolObservation, ReplicaState
from penstock.fleet.pool import Pool
from penstock.fleet.recorder import Recorder, Round
from penstock.fleet.replica_client import ReplicaClient
from penstock.fleet.residency.shared_device import Seen, SharedDevice, without_wish
from penstock.fleet.rollout_sizing import RolloutSizing
from penstock.fleet.settings import FleetSettings, PoolSettings
from penstock.observe.background import count_error, outliving
from penstock.rollout.runner import RolloutRunner
from penstock.tenancy.fleet import FleetReplica, ModelOrder, PoolDemand, PoolStatus
from penstock.tenancy.lease import LeaseKeeper
from penstock.tenancy.store import Store

log = logging.getLogger(__name__)

_FOLLOWER_S = 1.0  # between two looks at a lease that another controller holds
_NO_POOL = PoolSettings()
_USABLE = (ReplicaState.STANDBY, ReplicaState.ACTIVE, ReplicaState.DRAINING)


class Controller:
    def __init__(
        self,
        settings: FleetSettings,
        store: Store,
        driver: Driver,
        client: ReplicaClient,
        *,
        keeper: LeaseKeeper | None = None,
        device: SharedDevice | None = None,
        is_alone: bool = False,
        is_ephemeral: bool = False,
        clock: Callable[[], float] = time.time,
        on_change: Callable[[Sequence[PoolStatus]], None] = lambda _: None,
        on_failure: Callable[[FleetReplica, str], None] = lambda row, why: None,
    ) -> None:
        """`keeper`: of the lease; None: the store's. `device`: the one that all pools share, which decides for them;
        None: each pool decides for itself. `is_alone`: no other controller of this fleet can be running.
        `is_ephemeral`: the fleet ends with this process, however that ends. `on_change` is told of the pools after each
        round, `on_failure` of each replica that is lost, and why."""
        self._settings = settings
        self._is_ephemeral = is_ephemeral
        self._device = device
        self._orders: dict[str, ModelOrder] = {}
        self._book = store.fleet
        self._driver = driver
        self._client = client
        self._clock = clock
        self._on_change = on_change
        self._on_failure = on_failure
        self._keeper = keeper or LeaseKeeper(
            store.fleet, settings.name, secrets.token_hex(8), settings.lease_s, time.monotonic, is_alone=is_alone
        )
        self._recorder = Recorder(store, settings.name, self._keeper)
        self._sizing = RolloutSizing(settings.pool_settings() if device is None else {})
        self._rollouts = RolloutRunner(store, self._keeper.fenced, self._sizing.capacity, clock)
        self._commands = CommandRunner(driver, client, self._spec, clock, settings.driver_timeout_s)
        self._listing = Listing(driver, wait_s=settings.every_s, timeout_s=settings.driver_timeout_s, clock=clock)
        self._is_leading = False
        self._pools: dict[str, Pool] = {}
        self._rows: dict[str, FleetReplica] = {}
        self._heard_at: dict[str, float] = {}
        self._reports: dict[str, ReplicaReport] = {}

    async def run(self) -> None:
        """Runs until it is cancelled. A controller that is not the leader waits for its turn. Raises PoolTaken."""
        taken: PoolTaken | None = None
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
                    except PoolTaken as error:
                        taken = error
                        break
                self._is_leading = False
                await self._commands.drop()
                await asyncio.sleep(_FOLLOWER_S)
        finally:
            await self._commands.drop()
            await asyncio.to_thread(self._keeper.release)
        raise taken

    @property
    def is_leader(self) -> bool:
        return self._is_leading and self._keeper.is_held

    async def stop_all(self, grace_s: float, patience_s: float = math.inf) -> None:
        """Takes every replica from the gateways and ends it; for an operator who has ended the controllers. Raises
        ConfigError if one still leads after `patience_s`."""
        await self._take_lease(patience_s)
        found = await asyncio.to_thread(self._recorder.load, {}, self._clock())
        await asyncio.to_thread(self._recorder.remove_members)
        listed = await self._driver.list()
        await asyncio.gather(*(self._driver.stop(one, grace_s) for one in {*found, *(one.id for one in listed)}))
        await self._take_lease(patience_s)  # to stop replicas may take longer than it lasts
        await asyncio.to_thread(self._recorder.remove_all)
        await asyncio.to_thread(self._keeper.release)

    async def _take_lease(self, patience_s: float) -> None:
        until_s = time.monotonic() + patience_s
        while not await asyncio.to_thread(self._keeper.try_take):
            if time.monotonic() >= until_s:
                raise ConfigError("a controller of this fleet still runs; end it first, by Ctrl+C or SIGTERM")
            await asyncio.sleep(_FOLLOWER_S)  # another's lease expires

    # -- lead

    async def try_lead(self) -> bool:
        """Whether this controller acts from now on: it has the lease, and knows what its predecessor left."""
        if not await asyncio.to_thread(self._keeper.try_take):
            return False
        await self._take_over()
        self._is_leading = True
        log.info("this controller leads the fleet '%s' of %d replicas", self._settings.name, len(self._rows))
        return True

    async def _lead(self) -> None:
        while True:
            began = time.monotonic()
            await self.step()
            await asyncio.sleep(max(0.0, self._settings.every_s - (time.monotonic() - began)))

    async def _take_over(self) -> None:
        """Goes on from the store's rows."""
        name, now = self._settings.name, self._clock()
        self._pools = {
            pool: Pool(
                pool,
                one,
                self._settings.slo_of(pool, one),
                name,
                is_ephemeral=self._is_ephemeral,
                shares_machine=self._settings.driver == "local",
            )
            for pool, one in self._settings.pool_settings().items()
        }
        self._rows = await asyncio.to_thread(self._recorder.load, self._pools, now)
        self._heard_at = dict.fromkeys(self._rows, now)
        self._sizing.follow(await asyncio.to_thread(self._rollouts.live))
        if self._device is not None:
            for one in self._pools.values():
                one.durations.peers = [other.durations for other in self._pools.values() if other is not one]
            await asyncio.to_thread(self._recorder.begin_orders, self._device.first_orders())

    async def step(self) -> None:
        """One round. Raises LeaseLost or StoreUnavailable, and has then begun nothing that is not written down."""
        demand = await self._observe()
        now, orphans = self._clock(), self._orphans()
        self._adopt(now)
        commands = self._advance(now)
        device = self._device
        if device is not None:
            rounds = self._decide_together(device, demand, now)
            ended = {order: without_wish(order) for order in device.fulfilled()}
        else:
            self._observe_demand(demand, now)
            rounds, ended = [self._decide(pool, now) for pool in self._pools.values()], {}
        self._turn(now)
        commands |= self._advance(now)  # what was decided begins in the same round
        await asyncio.to_thread(self._recorder.write, self._rows, rounds, now, ended)
        self._sizing.took({one.pool.name: one.decision.wanted for one in rounds}, self._rows.values())
        for replica_id, command in commands.items():
            if replica_id in self._rows:
                self._commands.give(self._rows[replica_id], command)
        for row in orphans:
            self._commands.give(row, Command.STOP)
        for row in self._in_other_roles():
            self._commands.give(row, Command.ROLE)
        for replica_id in device.warm_ups() if device is not None else ():
            if replica_id in self._rows:
                self._commands.give(self._rows[replica_id], Command.PROBE)
        if isinstance(self._driver, NotingDriver):
            self._driver.note({row.id: self._note(row) for row in self._rows.values()})
        self._on_change([one.status for one in rounds])
        await self._run_rollouts()  # no replica waits for it

    async def _run_rollouts(self) -> None:
        """Pools keep the targets that they have where something goes wrong that nobody expected."""
        try:
            self._sizing.follow(await asyncio.to_thread(self._rollouts.step))
        except (LeaseLost, StoreUnavailable):
            raise
        except Exception as error:
            count_error("fleet controller", error)

    # -- observe

    async def _observe(self) -> list[PoolDemand]:
        """Refreshes the listing and reports; returns the demand."""
        await self._listing.refresh()
        asked = [row for row in self._rows.values() if row.url and row.state != ReplicaState.STOPPING]
        demand, reports = await asyncio.gather(
            asyncio.to_thread(self._book.demand), asyncio.gather(*(self._client.report(row.url) for row in asked))
        )
        found = {row.id: report for row, report in zip(asked, reports, strict=True) if report is not None}
        self._heard_at |= dict.fromkeys(found, self._clock())
        self._reports = found
        if self._device is not None:
            self._orders = await asyncio.to_thread(self._book.model_orders)
        return demand

    def _orphans(self) -> list[FleetReplica]:
        """Replicas that the driver has and no row names: left by a controller that died while it stopped them."""
        return [
            FleetReplica(one.id, one.pool, ReplicaState.STOPPING, 0.0, failure="it belongs to nobody")
            for one in self._listing.replicas.values()
            if one.id not in self._rows and not self._is_advisory(one.pool)
        ]

    def _adopt(self, now: float) -> None:
        """Replicas of advisory pools are as the driver lists them, whoever started them."""
        if self._listing.blind_s:
            return
        for one in self._listing.replicas.values():
            if (pool := self._pools.get(one.pool)) is not None and pool.settings.advisory and not one.failure:
                self._rows[one.id] = pool.adopted(one, self._rows.get(one.id), now)
        for row in [row for row in self._rows.values() if self._is_advisory(row.pool)]:
            listed = self._listing.replicas.get(row.id)
            if listed is None or listed.failure:
                self._forget(row)

    def _is_advisory(self, pool: str) -> bool:
        """Whether replicas of this pool are neither started nor stopped here."""
        found = self._pools.get(pool)
        return found.settings.advisory if found is not None else self._settings.advisory

    def _note(self, row: FleetReplica) -> ReplicaNote:
        if (report := self._reports.get(row.id)) is None:
            return ReplicaNote(row.state)
        measured = report.measured
        cached = measured.cache.cached_blocks * measured.limits.block_size
        return ReplicaNote(row.state, max(cached, measured.load.kv_active_tokens))

    def _advance(self, now: float) -> dict[str, Command]:
        """Each replica's next state, from what was seen of it; returns the commands to give."""
        commands: dict[str, Command] = {}
        for row in list(self._rows.values()):
            if self._is_advisory(row.pool):
                continue
            pool = self._pools.get(row.pool)
            if pool is None:  # the file no longer names its pool
                row = replace(row, target=ReplicaState.STOPPING)
            heard_at, listed = self._heard_at.get(row.id, row.created_at), self._listing.replicas.get(row.id)
            facts = Facts(listed, self._reports.get(row.id), heard_at, blind_s=self._listing.blind_s)
            if (outcome := self._commands.take_outcome(row.id)) is not None:
                facts = facts._replace(done=outcome.command, failure=outcome.failure, is_refused=outcome.is_refused)
            step = advance(row, facts, pool.settings if pool is not None else _NO_POOL, now)
            if pool is not None:
                pool.measure(row, step, now)
            if step.row is None:
                self._forget(row)
                continue
            if step.failure:
                self._on_failure(row, step.failure)
            self._rows[row.id] = pool.priced(step.row) if pool is not None else step.row
            if step.command is not None and row.id not in self._commands.running:
                commands[row.id] = step.command
        return commands

    def _forget(self, row: FleetReplica) -> None:
        del self._rows[row.id]
        self._heard_at.pop(row.id, None)
        if row.url:
            self._client.forget(row.url)

    # -- decide

    def _observe_demand(self, demand: Sequence[PoolDemand], now: float) -> None:
        """Every pool sees its demand before one is decided: versions of a rollout are sized by each other's too."""
        seen = self._listing
        for pool in self._pools.values():
            pool.observe_driver(seen.failure, seen.num_failures, is_blind=seen.blind_s > 0)
            pool.observe_demand([row for row in demand if row.pool == pool.serves], now)

    def _observe_pool(self, pool: Pool, now: float) -> PoolObservation:
        rows, sizing, name = self._of_pool(pool), self._sizing, pool.name
        partner = self._pools.get(sizing.target(name).partner)
        return pool.observation(
            rows,
            self._reports,
            now,
            self._spend_left_per_hour(),
            demand=sizing.demand(name, pool.demand(now), partner.demand(now) if partner is not None else None),
            floor=sizing.floor(name, goes_by_demand=pool.goes_by_demand, can_park=pool.can_park),
            kept=sizing.kept(name, rows) if pool.can_park else 0,
        )

    def _decide_together(self, device: SharedDevice, demand: Sequence[PoolDemand], now: float) -> list[Round]:
        """Returns the rounds of pools that share a device."""
        self._observe_demand(demand, now)
        parkable = frozenset(name for name, report in self._reports.items() if report.can_park)
        seen = {
            name: Seen(self._observe_pool(pool, now), pool.num_arrivals, parkable) for name, pool in self._pools.items()
        }
        rounds = []
        for name, decision in device.decide(seen, self._orders, now).items():
            pool = self._pools[name]
            pool.take_decision(decision)
            for action in decision.actions:
                self._aim(pool, action, now)
            status = pool.status(decision, self._of_pool(pool), now, device.residency(name))
            rounds.append(Round(pool, decision, status))
        return rounds

    def _spec(self, row: FleetReplica) -> ReplicaSpec:
        pool = self._pools[row.pool]
        spec = pool.spec(row)
        if self._device is None or pool.settings.tensors:  # an ONNX model has no cache that could be made to fit
            return spec
        engine = self._device.fitted(row.pool, spec.settings.engine)
        return dataclasses.replace(spec, settings=dataclasses.replace(spec.settings, engine=engine))

    def _decide(self, pool: Pool, now: float) -> Round:
        observation = self._observe_pool(pool, now)
        decision = pool.decide(observation, now)
        for action in decision.actions:
            self._aim(pool, action, now)
        return Round(pool, decision, pool.status(decision, self._of_pool(pool), now))

    def _aim(self, pool: Pool, action: Action, now: float) -> None:
        """An action of the policy becomes a target in a replica's row."""
        if action.kind is ActionKind.START:
            row = pool.new_replica(action, now)
            self._rows[row.id] = row
        elif (found := self._rows.get(action.replica)) is not None:
            self._rows[found.id] = replace(found, target=action.to)

    def _turn(self, now: float) -> None:
        """A replica that one pool gives up becomes the one that another pool of the same model and shape would start:
        only its role changes, and it loads nothing."""
        new = [row for row in self._rows.values() if row.state == ReplicaState.STARTING and row.created_at == now]
        for wanted in new:
            pool = self._pools[wanted.pool]
            for row in self._rows.values():
                other = self._pools.get(row.pool)
                is_given_up = row.target == ReplicaState.STOPPING and row.state in _USABLE and row.deadline is None
                is_alike = (row.zone, row.capacity_type) == (wanted.zone, wanted.capacity_type)
                if is_given_up and is_alike and other is not None and other is not pool and other.has_shape_of(pool):
                    log.info("replica %s of %s becomes one of %s", row.id, row.pool, pool.name)
                    del self._rows[wanted.id]
                    self._rows[row.id] = replace(row, pool=pool.name, target=wanted.target)
                    break

    def _in_other_roles(self) -> list[FleetReplica]:
        """Replicas whose role is not their pool's: that was changed, or they were another's."""
        return [
            row
            for row in self._rows.values()
            if (report := self._reports.get(row.id)) is not None
            and row.state in _USABLE
            and report.version  # a penstock replica's
            and (pool := self._pools.get(row.pool)) is not None
            and not pool.settings.advisory
            and report.role != pool.role
        ]

    def _spend_left_per_hour(self) -> float | None:
        if self._settings.spend_per_hour is None:
            return None
        return self._settings.spend_per_hour - sum(row.price_per_hour for row in self._rows.values())

    def _of_pool(self, pool: Pool) -> list[FleetReplica]:
        return [row for row in self._rows.values() if row.pool == pool.name]
