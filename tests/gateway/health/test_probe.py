import asyncio

from penstock.core.clock import MonotonicClock
from penstock.core.replica import ReplicaState
from penstock.gateway.health.probe import Prober
from penstock.gateway.health.replica_health import ReplicaHealth


class Scripted:
    """A replica whose answers are set by hand."""

    def __init__(self) -> None:
        self.ready: bool | None = True  # None: no answer at all
        self.drains = False
        self.token = False

    async def is_ready(self) -> bool:
        if self.ready is None:
            await asyncio.sleep(60)
        return bool(self.ready)

    async def is_draining(self) -> bool:
        if not self.drains:
            raise ConnectionRefusedError
        return True

    async def makes_a_token(self) -> bool:
        return self.token


def state(health: ReplicaHealth) -> ReplicaState:
    return health.state(0.0, 0.0)


async def test_probes_take_a_silent_replica_out_and_bring_it_back() -> None:
    replica, health = Scripted(), ReplicaHealth()
    prober = Prober(replica, health, MonotonicClock(), timeout_s=0.01)
    assert await prober.probe()
    assert state(health) is ReplicaState.READY
    replica.ready = None
    assert [await prober.probe() for _ in range(3)] == [False] * 3
    assert state(health) is ReplicaState.OUT
    replica.ready = True
    await prober.probe()
    await prober.probe()
    assert state(health) is ReplicaState.READY
    replica.ready, replica.drains = False, True
    assert await prober.probe()
    assert state(health) is ReplicaState.DRAINING


async def test_a_hung_replica_is_asked_for_a_token() -> None:
    replica, health = Scripted(), ReplicaHealth()
    prober = Prober(replica, health, MonotonicClock())
    await prober.probe()
    health.watchdog.observe(1, 7, 0.0)
    health.watchdog.observe(1, 7, 10.0)
    assert not await prober.probe()
    assert state(health) is ReplicaState.OUT
    replica.token = True
    assert await prober.probe()
    assert state(health) is ReplicaState.READY


async def test_the_loop_goes_on_whatever_happens() -> None:
    replica, health = Scripted(), ReplicaHealth()
    replica.ready = False
    task = asyncio.create_task(Prober(replica, health, MonotonicClock(), every_s=0.01).run())
    await asyncio.sleep(0.05)
    replica.ready = True
    await asyncio.sleep(0.1)
    task.cancel()
    assert state(health) is ReplicaState.READY
