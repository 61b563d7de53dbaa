"""A fleet that is a fake but for its controller and store: replicas in memory, and seconds that pass when told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from penstock.api.replica_report import ReplicaReport
from penstock.core.errors import CapacityRefused, EngineFailed
from penstock.core.measurements import EngineLoad, EngineMeasurements
from penstock.core.settings import Role
from penstock.fleet.controller import Controller
from penstock.fleet.drivers.driver import DriverReplica, ReplicaSpec
from penstock.fleet.policy.observation import CapacityType
from penstock.fleet.settings import FleetSettings
from penstock.tenancy.store import Store


class Crash(BaseException):
    """The process is killed here."""


class FakeDriver:
    """Replicas in memory. One that is started twice is an error, whoever asks."""

    def __init__(self) -> None:
        self.replicas: dict[str, DriverReplica] = {}
        self.started: Counter[str] = Counter()
        self.is_ready = True
        self.refuses: CapacityType | None = None
        self.fails = self.fails_to_list = False
        self.num_failed = 0
        self.hangs: set[str] = set()  # calls that never return, each "list" or "CALL POOL"
        self.num_hung: Counter[str] = Counter()
        self.calls_left = -1  # until a crash; negative: none

    async def start(self, spec: ReplicaSpec) -> None:
        self._call()
        await self._hang(f"start {spec.pool}")
        if self.refuses is spec.capacity_type:
            raise CapacityRefused("none left")
        if self.fails:
            self.num_failed += 1
            raise EngineFailed("the disk is full")
        if spec.id not in self.replicas:
            self.started[spec.id] += 1
            url = f"http://127.0.0.1:{10_000 + len(self.started)}"
            self.replicas[spec.id] = DriverReplica(spec.id, spec.pool, url, spec.zone, spec.capacity_type)
        self._call()

    async def stop(self, replica_id: str, grace_s: float) -> None:
        self._call()
        await self._hang(f"stop {replica_id.rpartition('-')[0]}")
        self.replicas.pop(replica_id, None)
        self._call()

    async def list(self) -> Sequence[DriverReplica]:
        self._call()
        await self._hang("list")
        if self.fails_to_list:
            raise EngineFailed("its API cannot be reached, so it cannot list")
        return [*self.replicas.values()]

    async def close(self) -> None: ...

    def lose(self, replica_id: str) -> None:
        """Its process is killed."""
        one = self.replicas[replica_id]
        self.replicas[replica_id] = DriverReplica(replica_id, one.pool, one.url, failure="killed")

    async def _hang(self, call: str) -> None:
        if call in self.hangs:
            self.num_hung[call] += 1
            await asyncio.Event().wait()

    def _call(self) -> None:
        if self.calls_left == 0:
            raise Crash
        self.calls_left -= 1


class FakeClient:
    """Replicas that answer for as long as the driver has them."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.num_open: Counter[str] = Counter()
        self.can_park = True
        self.roles: dict[str, Role] = {}  # by address

    async def report(self, url: str) -> ReplicaReport | None:
        if url not in {one.url for one in self._driver.replicas.values()}:
            return None
        state = "ready" if self._driver.is_ready else "starting"
        measured = EngineMeasurements(EngineLoad(num_open=self.num_open[url]))
        can_park = self.can_park and state == "ready"
        role = self.roles.get(url, "both")
        return ReplicaReport("b", "m", state, version="1", can_park=can_park, role=role, measured=measured)

    async def makes_token(self, url: str) -> bool:
        return True

    async def park(self, url: str) -> None: ...

    async def wake(self, url: str) -> None: ...

    async def set_role(self, url: str, role: Role) -> None:
        self.roles[url] = role

    def forget(self, url: str) -> None: ...

    def close(self) -> None: ...


class FakeFleet:
    """A fleet whose seconds pass when a test says so."""

    def __init__(self, store: Store, **pool: object) -> None:
        self.store = store
        self.driver = FakeDriver()
        self.client = FakeClient(self.driver)
        self.now = 1_000_000.0
        self.settings = FleetSettings(pools={"m": {"min": 2, "max": 4, **pool}})

    def controller(self, *, store: Store | None = None, **more: object) -> Controller:
        return Controller(
            self.settings,
            store or self.store,
            self.driver,
            self.client,  # type: ignore[arg-type]
            clock=lambda: self.now,
            **{"is_alone": True, **more},  # type: ignore[arg-type]
        )

    async def run(self, controller: Controller, seconds: int, *, waits: bool = False) -> None:
        """`waits`: for commands that take their time."""
        for _ in range(seconds):
            await controller.step()
            for _ in range(3):
                await asyncio.sleep(0)  # its commands
            while waits and (running := controller._commands.running):
                await asyncio.wait([*running.values()])
            self.now += 1.0

    def states(self) -> Counter[str]:
        return Counter(row.state for row in self.store.fleet.replicas())

    def members(self) -> dict[str, bool]:
        return {row.url: row.is_draining for row in self.store.replicas.all()}


async def leading(fleet: FakeFleet, **more: object) -> Controller:
    controller = fleet.controller(**more)
    assert await controller.try_lead()
    return controller
